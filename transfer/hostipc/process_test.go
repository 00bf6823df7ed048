package hostipc

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/quick"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// wide has pages of 128 KiB, so that a read takes several calls, and calls end inside of
// rows.
var wide = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 1, Pages: 100, PageSize: 16, KVHeads: 32, HeadDim: 64}

// anonymous is a cache of wide in memory that is no memfd, and an engine that offers it.
type anonymous struct {
	bytes  []byte
	source transfer.Source
	target transfer.Target
}

func newAnonymous(t testing.TB) *anonymous {
	t.Helper()
	a := &anonymous{}
	g := must(wide.PageMajor())(t)
	a.bytes = must(unix.Mmap(-1, 0, int(g.Bytes()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS))(t)
	t.Cleanup(func() { noError(t, unix.Munmap(a.bytes)) })
	for i := range a.bytes {
		a.bytes[i] = byte(i>>12) ^ byte(i)
	}
	x := smallExport(t)
	x.Cache = must(kv.Wrap(g, []*device.Memory{device.WrapHost(a.bytes)}))(t)
	e := must(New(Options{Dir: directory(t)}))(t)
	offer, withdraw, err := e.Offer(x)
	noError(t, err)
	t.Cleanup(withdraw)
	a.target = targetOf(t, g)
	a.source = must(e.Open(t.Context(), a.target, &transfer.Descriptor{Owner: x.Owner, Geometry: g}, offer))(t)
	t.Cleanup(func() { noError(t, a.source.Close()) })
	return a
}

// countdown is a context that ends when it has been asked so many times.
type countdown struct {
	context.Context //nolint:containedctx // it is one
	left            int
}

func (c *countdown) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

func TestProcess_ReadsInManyCalls(t *testing.T) {
	nothingLeft(t)
	a := newAnonymous(t)
	noError(t, a.source.Copy(t.Context(), nil, planOf(t, 100)))
	if got := must(a.target.Cache.Region(0))(t).Bytes(); string(got) != string(a.bytes) {
		t.Error("other bytes arrived")
	}
	err := a.source.Copy(&countdown{t.Context(), 2}, nil, planOf(t, 100))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("given up in the middle: %v, want canceled", err)
	}
}

func TestProcess_AllocatesNothingForAPage(t *testing.T) {
	a := newAnonymous(t)
	few, many := planOf(t, 2), planOf(t, 100)
	allocations := func(p *transfer.Plan) float64 {
		return testing.AllocsPerRun(50, func() { noError(t, a.source.Copy(t.Context(), nil, p)) })
	}
	allocations(many) // grows what is kept
	if f, m := allocations(few), allocations(many); m > f+1 {
		t.Errorf("%v allocations for 2 pages, %v for 100", f, m)
	}
}

// Memory that is no longer there is said to be gone, wherever a call has ended.
func TestProcess_SaysWhatIsGone(t *testing.T) {
	a := newAnonymous(t)
	for _, at := range []int{0, 3 * os.Getpagesize(), callBytes, len(a.bytes) - os.Getpagesize()} {
		hole := a.bytes[at:][:os.Getpagesize()]
		noError(t, unix.Mprotect(hole, unix.PROT_NONE))
		wantKind(t, a.source.Copy(t.Context(), nil, planOf(t, 100)), fault.NotFound, "is not where its owner has said")
		noError(t, unix.Mprotect(hole, unix.PROT_READ|unix.PROT_WRITE))
		noError(t, a.source.Copy(t.Context(), nil, planOf(t, 100)))
	}
}

func TestComplete_CountsWholeVectors(t *testing.T) {
	noError(t, quick.Check(func(lengths []uint8, n uint16) bool {
		var remote []unix.RemoteIovec
		for _, l := range lengths {
			remote = append(remote, unix.RemoteIovec{Len: int(l)})
		}
		k, sum := complete(remote, int(n)), 0
		for _, v := range remote[:k] {
			sum += v.Len
		}
		return sum <= int(n) && (k == len(remote) || sum+remote[k].Len > int(n))
	}, nil))
}

// A process that this one may not read is refused when it is opened, by name.
func TestOpen_ProcessesThatMayNotBeRead(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root has a right to give up for it")
	}
	dir := directory(t)
	o := start(t, childSpec{wrapped, dir, small})
	e := must(New(Options{Dir: dir}))(t)
	target := smallTarget(t)
	opened := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with this goroutine
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		err := unix.Capget(&head, &data[0])
		for i := range data {
			data[i].Effective, data[i].Permitted, data[i].Inheritable = 0, 0, 0
		}
		if err = errors.Join(err, unix.Capset(&head, &data[0])); err == nil {
			_, err = e.Open(t.Context(), target, o.d, o.offer())
		}
		opened <- err
	}()
	err := <-opened
	wantKind(t, err, fault.Unsupported, "process_vm_readv")
	if !strings.Contains(fault.RemedyOf(err), "memory that can be shared") {
		t.Errorf("the remedy is %q", fault.RemedyOf(err))
	}
}

func TestFailure_HasAKindAndARemedy(t *testing.T) {
	dir := directory(t)
	l := must(handoff.Listen(handoff.ListenOptions{Dir: dir, Prefix: name, Serve: func(ctx context.Context, c *handoff.Conn) {
		_ = c.SendHello(ctx, nil, nil)
		_, _ = c.Receive(ctx)
	}}))(t)
	defer func() { noError(t, l.Close()) }()
	conn, _, err := handoff.Dial(t.Context(), l.Name(), handoff.DialOptions{Dir: dir})
	noError(t, err)
	p := &process{conn: conn}
	for err, kind := range map[error]fault.Kind{
		unix.ESRCH: fault.NotFound, unix.EFAULT: fault.NotFound, nil: fault.NotFound, unix.EPERM: fault.Unsupported,
		unix.ENOSYS: fault.Unsupported, unix.ENOMEM: fault.Memory, unix.EINVAL: fault.Device,
	} {
		wantKind(t, p.failure(7, err), kind, "process 7")
	}
	noError(t, conn.Close())
	wantKind(t, p.failure(7, unix.EPERM), fault.NotFound, "has ended")
	wantKind(t, p.read(&batch{local: make([]unix.Iovec, 1)}), fault.NotFound, "has ended")
	remedies := map[string]bool{}
	for scope := noYama; scope <= 3; scope++ {
		if scope != 0 {
			remedies[remedy(scope)] = true
		}
	}
	if len(remedies) != 4 {
		t.Errorf("%d remedies of 4", len(remedies))
	}
	wantKind(t, probeProcess(3), fault.Unsupported, "ptrace_scope is 3")
	noError(t, probeProcess(0))
}

func itoa(n int) string { return strconv.Itoa(n) }

// planOf reads the first n pages onto themselves.
func planOf(t testing.TB, n int) *transfer.Plan {
	t.Helper()
	var ids []page.ID
	for id := range page.ID(n) {
		ids = append(ids, id)
	}
	p := &transfer.Plan{}
	noError(t, p.Set(0, n, ids, ids, 1))
	return p
}
