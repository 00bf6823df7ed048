package hostipc

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// impostor is an owner that says whatever a test has it say.
type impostor struct {
	*exported
	grant *grant
	files []int
	raw   []byte // instead of the grant
	mute  bool
}

// exported is a cache, what is said of it, and a reader's engine and target.
type exported struct {
	transfer.Export
	dir    string
	d      *transfer.Descriptor
	engine *Engine
	target transfer.Target
}

func newExported(t testing.TB) *exported {
	t.Helper()
	x := &exported{Export: smallExport(t), dir: directory(t)}
	x.d = &transfer.Descriptor{Owner: x.Owner, Geometry: x.Cache.Geometry()}
	x.engine = must(New(Options{Dir: x.dir}))(t)
	x.target = smallTarget(t)
	return x
}

// newImpostor says the truth until a test changes that.
func newImpostor(t testing.TB) *impostor {
	t.Helper()
	m := &impostor{exported: newExported(t)}
	var err error
	m.grant, m.files, err = m.engine.describe(m.Export)
	noError(t, err)
	return m
}

func (m *impostor) open(t testing.TB) (transfer.Source, error) {
	t.Helper()
	payload := m.raw
	if payload == nil {
		payload = m.grant.form()
	}
	l := must(handoff.Listen(handoff.ListenOptions{Dir: m.dir, Prefix: name, Serve: func(ctx context.Context, c *handoff.Conn) {
		if !m.mute && c.SendHello(ctx, payload, m.files) != nil {
			return
		}
		_, _ = c.Receive(ctx)
	}}))(t)
	defer func() { noError(t, l.Close()) }()
	limit := patience
	if m.mute {
		limit = 20 * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return m.engine.Open(ctx, m.target, m.d, formOffer(l.Name()))
}

// memfd returns shared memory, closed when the test ends.
func memfd(t testing.TB, size int64, seals int) int {
	t.Helper()
	fd := must(unix.MemfdCreate("kvferry-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING))(t)
	t.Cleanup(func() { noError(t, unix.Close(fd)) })
	noError(t, unix.Ftruncate(fd, size))
	if seals != 0 {
		must(unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals))(t)
	}
	return fd
}

const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// An owner that is none costs one error, and leaves nothing mapped or open.
func TestOpen_RefusesImpostors(t *testing.T) {
	nothingLeft(t)
	for _, x := range []struct {
		name string
		make func(t *testing.T, m *impostor)
		kind fault.Kind
		text string
	}{
		{"another owner", func(_ *testing.T, m *impostor) { m.grant.owner[3]++ }, fault.Invalid, "is of owner"},
		{"another geometry", func(_ *testing.T, m *impostor) { m.grant.geometry[3]++ }, fault.Invalid, "has another geometry"},
		{"no payload", func(_ *testing.T, m *impostor) { m.raw = []byte{} }, fault.Invalid, "truncated"},
		{"a truncated payload", func(_ *testing.T, m *impostor) { m.raw = m.grant.form()[:70] }, fault.Invalid, "truncated"},
		{"trailing bytes", func(_ *testing.T, m *impostor) { m.raw = append(m.grant.form(), 0) }, fault.Invalid, "trailing"},
		{"another version", func(_ *testing.T, m *impostor) { m.raw = append([]byte{9}, m.grant.form()[1:]...) }, fault.Unsupported, "version 9"},
		{"descriptors missing", func(_ *testing.T, m *impostor) { m.files = m.files[:1] }, fault.Invalid, "comes with 1 descriptors, and not 2"},
		{"descriptors too many", func(_ *testing.T, m *impostor) { m.files = append(m.files, m.files...) }, fault.Invalid, "comes with 4 descriptors"},
		{"a region too few", func(_ *testing.T, m *impostor) { m.grant.regions = nil }, fault.Invalid, "0 regions"},
		{"a region too small", func(_ *testing.T, m *impostor) {
			r := &m.grant.regions[0]
			r.bytes -= 8
			r.pieces[0].bytes -= 8
		}, fault.Invalid, "its geometry needs"},
		{"a file too small", func(t *testing.T, m *impostor) { m.files[1] = memfd(t, 100, sealed) }, fault.Invalid, "of 100 bytes, and"},
		{"words too small", func(t *testing.T, m *impostor) { m.files[0] = memfd(t, 63, sealed) }, fault.Invalid, "of 63 bytes, and 64"},
		{"memory that can shrink", func(t *testing.T, m *impostor) { m.files[1] = memfd(t, 1<<20, 0) }, fault.Invalid, "can be resized"},
		{"words that can shrink", func(t *testing.T, m *impostor) { m.files[0] = memfd(t, 4096, unix.F_SEAL_GROW) }, fault.Invalid, "can be resized"},
		{"a regular file", func(t *testing.T, m *impostor) {
			f := must(os.Create(filepath.Join(t.TempDir(), "f")))(t)
			t.Cleanup(func() { noError(t, f.Close()) })
			noError(t, f.Truncate(1<<20))
			m.files[1] = int(f.Fd())
		}, fault.Invalid, "not of a memfd"},
		{"a file for writing alone", func(t *testing.T, m *impostor) {
			fd := memfd(t, 1<<20, sealed)
			f := must(os.OpenFile("/proc/self/fd/"+itoa(fd), os.O_WRONLY, 0))(t)
			t.Cleanup(func() { noError(t, f.Close()) })
			m.files[1] = int(f.Fd())
		}, fault.Invalid, "not for reading"},
		{"memory at no address", func(_ *testing.T, m *impostor) { m.byProcess(4096) }, fault.NotFound, "is not where its owner has said"},
		{"memory beyond all addresses", func(_ *testing.T, m *impostor) { m.byProcess(1<<64 - 100) }, fault.Invalid, "bytes at 0xffffffffffffff9c"},
		{"memory of the kernel", func(_ *testing.T, m *impostor) { m.byProcess(0xffff888000000000) }, fault.NotFound, "is not where"},
		{"no word", func(_ *testing.T, m *impostor) { m.mute = true }, fault.Busy, "has not answered in time"},
	} {
		t.Run(x.name, func(t *testing.T) {
			nothingLeft(t)
			m := newImpostor(t)
			x.make(t, m)
			s, err := m.open(t)
			if s != nil {
				t.Fatal("was opened")
			}
			wantKind(t, err, x.kind, x.text)
		})
	}
	m := newImpostor(t) // the control: what says the truth is opened
	s, err := m.open(t)
	noError(t, err)
	noError(t, s.Close())
}

// byProcess says that the regions lie at an address in this process.
func (m *impostor) byProcess(base uint64) {
	m.grant.byProcess = true
	m.files = m.files[:1]
	for i := range m.grant.regions {
		m.grant.regions[i] = extent{base: base, bytes: m.grant.regions[i].bytes}
	}
}

func TestOpen_RefusesOffers(t *testing.T) {
	x := newExported(t)
	for _, o := range []struct {
		offer []byte
		kind  fault.Kind
		text  string
	}{
		{nil, fault.Invalid, "0 bytes"},
		{[]byte{1}, fault.Invalid, "1 bytes"},
		{bytes.Repeat([]byte{1}, maxOffer+1), fault.Invalid, "65 bytes"},
		{[]byte("\x02hostipc-"), fault.Unsupported, "version 2"},
		{[]byte("\x01../../etc/passwd"), fault.Invalid, "is no name"},
		{[]byte("\x01cudaipc-00000000000000000000000000000000"), fault.Invalid, "is no name"},
		{[]byte("\x01hostipc-../00000000000000000000000000000"), fault.Invalid, "is no name"},
		{[]byte("\x01hostipc-00000000000000000000000000000000"), fault.NotFound, "no such file"},
	} {
		_, err := x.engine.Open(t.Context(), x.target, x.d, o.offer)
		wantKind(t, err, o.kind, o.text)
	}
}

func TestOffer_RefusesMemoryOfDevices(t *testing.T) {
	nothingLeft(t)
	x := newExported(t)
	far := device.NewMemory(device.MemoryOptions{Device: "gpu", Base: 1 << 40, Size: x.Cache.Bytes()})
	x.Cache = must(kv.Wrap(x.Cache.Geometry(), []*device.Memory{far}))(t)
	_, _, err := x.engine.Offer(x.Export)
	wantKind(t, err, fault.Unsupported, "is memory of gpu")
	if fault.RemedyOf(err) == "" {
		t.Error("no remedy")
	}
	x = newExported(t)
	x.Words = device.WrapHost(make([]byte, 64))
	_, _, err = x.engine.Offer(x.Export)
	wantKind(t, err, fault.Unsupported, "epoch words")
	_, err = New(Options{MaxConns: -1})
	wantKind(t, err, fault.Invalid, "MaxConns")
}

// A directory that is no good is an error of the offer, and nothing stays open.
func TestOffer_WantsADirectory(t *testing.T) {
	nothingLeft(t)
	x := newExported(t)
	x.engine = must(New(Options{Dir: filepath.Join(x.dir, "none")}))(t)
	_, _, err := x.engine.Offer(x.Export)
	wantKind(t, err, fault.NotFound, "none")
}

// Pages that would be read onto themselves are refused, however they are wrapped.
func TestOpen_RefusesTheReadersOwnMemory(t *testing.T) {
	nothingLeft(t)
	for _, unmappable := range []bool{false, true} {
		x := newExported(t)
		owner := must(New(Options{Dir: x.dir, unmappable: unmappable}))(t)
		offer, withdraw, err := owner.Offer(x.Export)
		noError(t, err)
		defer withdraw()
		x.target.Cache = must(kv.Wrap(x.Cache.Geometry(), []*device.Memory{must(x.Cache.Region(0))(t)}))(t)
		_, err = x.engine.Open(t.Context(), x.target, x.d, offer)
		wantKind(t, err, fault.Invalid, "the reader's own")
	}
}

// When an owner withdraws, what is being read stays until it is read, and not longer.
func TestSource_MemoryGoesWithItsOwner(t *testing.T) {
	nothingLeft(t)
	x := newExported(t)
	_, before := count(t)
	offer, withdraw, err := x.engine.Offer(x.Export)
	noError(t, err)
	opened, err := x.engine.Open(t.Context(), x.target, x.d, offer)
	noError(t, err)
	s := opened.(*source)
	host := x.target.Device.(*device.Host)
	stream := must(host.NewStream("reads"))(t)
	defer func() { noError(t, stream.Close()) }()
	release := host.Hold(stream)
	over := make(chan error, 1)
	go func() { over <- s.Copy(t.Context(), stream, planOf(t, 2)) }()
	for s.inUse() == 0 {
		await(t)
	}
	withdraw()
	for !s.ended() {
		await(t)
	}
	if _, now := count(t); now != before+2 {
		t.Errorf("%d mappings in the middle of a copy, want %d", now, before+2)
	}
	release()
	noError(t, <-over)
	if _, now := count(t); now != before {
		t.Errorf("%d mappings after it, want %d", now, before)
	}
	_, err = s.Epoch(t.Context(), 0)
	wantKind(t, err, fault.NotFound, "has ended, or closed its publisher")
	wantKind(t, s.Copy(t.Context(), stream, planOf(t, 1)), fault.NotFound, "has ended")
	wantKind(t, s.Join(transfer.Epoch{}), fault.NotFound, "has ended")
	noError(t, s.Close())
	noError(t, s.Close())
	_, err = x.engine.Open(t.Context(), x.target, x.d, offer)
	wantKind(t, err, fault.NotFound, "no such file")
}

func (s *source) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.uses
}

func (s *source) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.over
}

// await lets others go on.
func await(t testing.TB) {
	t.Helper()
	select {
	case <-time.After(time.Millisecond):
	case <-t.Context().Done():
	}
}

// A dead owner's memory goes at once, without anybody reading from it.
func TestSource_DeadOwnersKeepNoMemory(t *testing.T) {
	nothingLeft(t)
	dir := directory(t)
	for _, kind := range []string{mapped, wrapped} {
		target := smallTarget(t)
		_, before := count(t)
		o := start(t, childSpec{kind, dir, small})
		e := must(New(Options{Dir: dir, Populate: true}))(t)
		s := must(e.Open(t.Context(), target, o.d, o.offer()))(t)
		must(s.Epoch(t.Context(), o.d.Epoch.Word))(t)
		_, err := s.Epoch(t.Context(), 1<<20)
		wantKind(t, err, fault.Invalid, "word")
		_, during := count(t)
		noError(t, o.Process.Kill())
		_ = o.Wait() // was killed
		for now := during; now > before; _, now = count(t) {
			await(t)
		}
		_, err = s.Epoch(t.Context(), o.d.Epoch.Word)
		wantKind(t, err, fault.NotFound, "has ended")
		noError(t, s.Close())
		_, err = e.Open(t.Context(), target, o.d, o.offer())
		wantKind(t, err, fault.NotFound, "refused")
	}
}

// A copy is refused when it is too late before it begins.
func TestSource_CopyEndsWithItsContext(t *testing.T) {
	x := newExported(t)
	offer, withdraw, err := x.engine.Offer(x.Export)
	noError(t, err)
	defer withdraw()
	s := must(x.engine.Open(t.Context(), x.target, x.d, offer))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Copy(ctx, nil, planOf(t, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	noError(t, s.Close())
	e := must(New(Options{Dir: x.dir, Populate: true}))(t)
	if _, err := e.Open(ctx, x.target, x.d, offer); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
}

func TestProbe(t *testing.T) {
	nothingLeft(t)
	r := Probe(t.Context(), Options{Dir: directory(t)})
	noError(t, r.Sharing)
	if r.Process != nil && (r.PtraceScope < 1 || fault.RemedyOf(r.Process) == "") {
		t.Errorf("%+v", r)
	}
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("TMPDIR", "/nowhere")
	r = Probe(t.Context(), Options{})
	wantKind(t, r.Sharing, fault.NotFound, "/nowhere/kvferry-")
}
