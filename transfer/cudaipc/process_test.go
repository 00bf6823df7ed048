//go:build !nogpu

package cudaipc

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// ownerVariable has the orders of a process that owns a cache: see runOwner.
const ownerVariable = "KVFERRY_TEST_OWNER"

// orders say what a process is to be.
type orders struct {
	Vendor        fakedriver.Vendor
	Kind          string // of memory
	Which         string // device
	Library, Dir  string
	Event, Tensor bool
}

// shape is the geometry of the caches in these tests: one tensor of NHD.
var shape = kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 12, PageSize: 8, KVHeads: 2, HeadDim: 32}

// own is what a process has.
type own struct {
	orders
	acc       *device.Accelerator
	addr      uintptr
	free      func() error
	cache     *kv.Cache
	region    *device.Memory
	host      *device.Host
	publisher *transfer.Publisher
	event     *cuda.SharedEvent
	stream    device.StreamHandle
	lib       *dl.Library
}

// runOwner is what the process of an owner does: it takes orders by lines, and answers
// each with one.
func runOwner(text string) error {
	p := &own{}
	err := json.Unmarshal([]byte(text), &p.orders)
	if err == nil {
		err = p.open()
	}
	for in := bufio.NewScanner(os.Stdin); err == nil && in.Scan(); {
		var answer string
		if answer, err = p.do(in.Text()); err == nil {
			_, err = fmt.Fprintln(os.Stdout, answer)
		}
	}
	if err != nil {
		return err
	}
	return errors.Join(p.close(), nothingLeft(p.Library))
}

func (p *own) open() (err error) {
	if p.lib, err = dl.Open(p.Library); err != nil {
		return err
	}
	if p.acc, err = openDevice(p.Vendor, p.Which, p.Library, runtimeOf(p.Library)); err != nil {
		return err
	}
	g, err := shape.LayerMajor()
	if err != nil {
		return err
	}
	if p.addr, p.free, err = (config{kind: p.Kind}).memory(p.acc, g.Bytes()); err != nil {
		return err
	}
	if err := p.poke(contents(g.Bytes())); err != nil {
		return err
	}
	if p.region, err = p.acc.Wrap(p.addr, g.Bytes()); err != nil {
		return err
	}
	if p.cache, err = kv.WrapOn(g, []*device.Memory{p.region}, p.acc); err != nil {
		return err
	}
	if p.host, err = device.OpenHost(device.HostOptions{}); err != nil {
		return err
	}
	o := Options{Dir: p.Dir, Linger: time.Hour}
	if p.Event {
		d := p.acc.Driver().(*cuda.Driver)
		if p.event, err = d.NewSharedEvent(); err != nil {
			return err
		}
		if p.stream, err = d.NewStream(device.NormalPriority); err != nil {
			return err
		}
		h, err := p.event.Export()
		if err != nil {
			return err
		}
		o.Event = h[:]
	}
	e, err := New(p.acc, o)
	if err != nil {
		return err
	}
	p.publisher, err = transfer.NewPublisher(transfer.PublisherOptions{
		Cache: p.cache, Holder: keeper{}, Host: p.host, Engines: []transfer.Engine{e},
	})
	return err
}

// keeper is a holder that has nothing to do.
type keeper struct{}

func (keeper) Hold([]page.ID) error    { return nil }
func (keeper) Release([]page.ID) error { return nil }

// contents are the bytes of a cache.
func contents(n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

func (p *own) poke(b []byte) error {
	block, err := dl.NewBlock(len(b)/8 + 1)
	if err != nil {
		return err
	}
	defer block.Free()
	copy(block.Bytes, b)
	if p.lib.Find("fakePoke").Call(p.addr, block.Addr, uintptr(len(b))) != 0 {
		return errors.New("poke")
	}
	return nil
}

func (p *own) do(order string) (answer string, err error) {
	switch order {
	case "publish":
		d, err := p.publisher.Publish(transfer.Lease{Pages: []page.ID{1, 2, 3, 4}, TTL: time.Minute})
		if err != nil {
			return "", err
		}
		b, err := d.AppendBinary(nil)
		return hex.EncodeToString(b), err
	case "free": // while it is offered, which no owner may do
		free := p.free
		p.free = func() error { return nil }
		return "freed", free()
	case "stop":
		return "stopped", p.publisher.Close()
	case "hold": // work that writes the pages is not over, and then recorded
		if p.lib.Find("fakeHold").Call(uintptr(p.stream)) != 0 {
			return "", errors.New("hold")
		}
		return "held", p.acc.Driver().Record(p.event.Event, p.stream)
	case "release":
		p.lib.Find("fakeRelease").Call(uintptr(p.stream))
		return "released", nil
	case "event":
		h, err := p.event.Export()
		if err != nil {
			return "", err
		}
		b, err := json.Marshal(h[:])
		return string(b), err
	case "tensor":
		return p.tensor()
	}
	return "", fmt.Errorf("no order %q", order)
}

// tensor shares the cache as torch does, but for the form of its handle.
func (p *own) tensor() (string, error) {
	t := &Tensor{
		StorageBytes: p.cache.Bytes(), DType: "torch.bfloat16", UUID: p.acc.Attributes().UUID,
		Size: []int64{2, 12, 2, 8, 2, 32}, Stride: []int64{12 * 1024, 1024, 512, 64, 32, 1},
	}
	_, driver, err := sharingOf(p.acc)
	if err != nil {
		return "", err
	}
	if p.Kind == plainMemory {
		h, offset, _, err := driver.exportMemory(p.addr)
		if err != nil {
			return "", err
		}
		t.Handle, t.StorageOffset = h[:], offset
	} else {
		pieces, offset, err := driver.exportPieces(p.addr, t.StorageBytes, 4)
		if err != nil {
			return "", err
		}
		t.Handle, t.StorageOffset = expandable(2, int32(os.Getpid()), pieces), offset
		free := p.free
		p.free = func() error {
			for _, x := range pieces {
				closeAll([]int{x.fd})
			}
			return free()
		}
	}
	b, err := json.Marshal(t)
	return string(b), err
}

func (p *own) close() error {
	err := errors.Join(p.publisher.Close(), p.cache.Close(), p.region.Free(), p.free(), p.host.Close())
	if p.event != nil {
		err = errors.Join(err, p.acc.Driver().CloseStream(p.stream), p.event.Close())
	}
	return errors.Join(err, p.acc.Close())
}

// owner is the process of an owner, seen from its test.
type owner struct {
	testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// start starts an owner, which the end of the test ends.
func (g *ground) start(t testing.TB, o orders) *owner {
	t.Helper()
	o.Vendor, o.Dir, o.Library = g.Vendor, g.dir, os.Getenv(libraryVariable)
	if o.Kind == "" {
		o.Kind = g.kind
	}
	if o.Which == "" {
		o.Which = "0"
	}
	text := must(json.Marshal(o))(t)
	cmd := exec.CommandContext(context.Background(), os.Args[0]) // ends when its input does
	cmd.Env = append(os.Environ(), ownerVariable+"="+string(text), "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in := must(cmd.StdinPipe())(t)
	out := must(cmd.StdoutPipe())(t)
	noError(t, cmd.Start())
	p := &owner{t, cmd, in, bufio.NewScanner(out)}
	p.out.Buffer(nil, 1<<20)
	t.Cleanup(func() {
		if p.cmd != nil {
			_ = in.Close() // it may have ended
			noError(t, cmd.Wait())
		}
	})
	return p
}

func (p *owner) tell(order string) {
	p.Helper()
	_, err := fmt.Fprintln(p.in, order)
	noError(p, err)
}

func (p *owner) answer() string {
	p.Helper()
	if !p.out.Scan() {
		p.Fatalf("the owner has gone: %v", p.out.Err())
	}
	return p.out.Text()
}

func (p *owner) ask(order string) string {
	p.Helper()
	p.tell(order)
	return p.answer()
}

func (p *owner) publish() *transfer.Descriptor {
	p.Helper()
	return must(transfer.Decode(must(hex.DecodeString(p.ask("publish")))(p)))(p)
}

// kill ends the process, and returns when it is no more.
func (p *owner) kill() {
	p.Helper()
	noError(p, p.cmd.Process.Signal(unix.SIGKILL))
	_ = p.cmd.Wait() // says that it was killed
	p.cmd = nil
}

func runtimeOf(library string) string {
	return strings.Replace(library, "libfakecuda.so", "libfakecudart.so", 1)
}
