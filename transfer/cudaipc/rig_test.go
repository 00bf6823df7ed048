//go:build !nogpu

package cudaipc

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/internal/dl"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// What a process that the suite starts is told by its environment.
const (
	libraryVariable = "KVFERRY_TEST_LIBRARY"
	dirVariable     = "KVFERRY_TEST_DIR"
)

// config is a library, and the kind of memory that caches lie in.
type config struct {
	fakedriver.Options
	kind string
}

// The kinds of memory. Caches begin inside what was allocated, and those of two pieces
// cross from one to the other.
const (
	plainMemory  = "handle"
	mappedMemory = "descriptor"
	twoPieces    = "two descriptors"
)

func configs() (all []config) {
	for _, o := range []fakedriver.Options{
		{Version: fakedriver.CUDA124, Mode: fakedriver.Eager},
		{Version: fakedriver.CUDA130, Delay: 1},
		{Vendor: fakedriver.HIP, Version: fakedriver.ROCm64, Delay: 1},
		{Vendor: fakedriver.HIP, Version: fakedriver.ROCm713, Mode: fakedriver.Eager},
	} {
		for _, kind := range []string{plainMemory, mappedMemory, twoPieces} {
			all = append(all, config{o, kind})
		}
	}
	return all
}

func (c config) String() string { return fmt.Sprintf("%v %d %s", c.Vendor, c.Version, c.kind) }

func openDevice(vendor fakedriver.Vendor, which, library, runtime string) (*device.Accelerator, error) {
	if vendor == fakedriver.HIP {
		return hip.Open(which, hip.Options{Library: library})
	}
	return cuda.Open(which, cuda.Options{Library: library, Runtime: runtime})
}

// side opens device 0 of a library, and an engine on it.
func (c config) side(library, runtime, dir string) (transfertest.Side, error) {
	a, err := openDevice(c.Vendor, "0", library, runtime)
	if err != nil {
		return transfertest.Side{}, err
	}
	e, err := New(a, Options{Dir: dir})
	if err != nil {
		return transfertest.Side{}, errors.Join(err, a.Close())
	}
	var shared []func() error
	return transfertest.Side{
		Engine: e, Device: a,
		Copier: copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{}),
		Memory: func(bytes int64) (*device.Memory, error) {
			addr, free, err := c.memory(a, bytes)
			if err != nil {
				return nil, err
			}
			shared = append(shared, free)
			return a.Wrap(addr, bytes)
		},
		Close: func() error {
			var errs []error
			for _, free := range shared {
				errs = append(errs, free())
			}
			return errors.Join(append(errs, a.Close())...)
		},
	}, nil
}

// memory returns memory of the kind, as an engine's allocator would.
func (c config) memory(a *device.Accelerator, bytes int64) (addr uintptr, free func() error, err error) {
	const before = 4096
	if c.kind == plainMemory {
		addr, err := a.Driver().Alloc(before + bytes)
		return addr + before, func() error { return a.Driver().Free(addr) }, err
	}
	_, driver, err := sharingOf(a)
	if err != nil {
		return 0, nil, err
	}
	first, freeFirst, err := driver.allocShared(before + bytes)
	if err != nil || c.kind == mappedMemory {
		return first + before, freeFirst, err
	}
	second, freeSecond, err := driver.allocShared(before + bytes)
	if err != nil {
		return 0, nil, errors.Join(err, freeFirst())
	}
	both, offset, err := exportBoth(driver, first, second)
	if err != nil {
		return 0, nil, err
	}
	m, err := driver.openPieces(both)
	for _, p := range both {
		closeAll([]int{p.fd})
	}
	return m.addr + uintptr(offset) - before, func() error { return errors.Join(m.close(), freeFirst(), freeSecond()) }, err
}

// exportBoth returns the pieces of two memories, and where the second begins.
func exportBoth(driver sharing, first, second uintptr) (both []piece, offset int64, err error) {
	for _, addr := range []uintptr{first, second} {
		pieces, _, err := driver.exportPieces(addr, 1, 1)
		if err != nil {
			return nil, 0, err
		}
		both = append(both, pieces...)
	}
	return both, both[0].bytes, nil
}

// nothingLeft asks the fake in this process what has not been given back.
func nothingLeft(library string) error {
	lib, err := dl.Open(library)
	if err != nil {
		return err
	}
	b, err := dl.NewBlock(32)
	if err != nil {
		return err
	}
	defer b.Free()
	const live = 10 // counts of things that live come first
	lib.Find("fakeCounts").Call(b.Addr, live)
	for _, n := range b.Words[:live] {
		if n != 0 {
			return fmt.Errorf("the library has still open: %d", b.Words[:live])
		}
	}
	return nil
}

// ground is the fake of a test, and what its processes are told.
type ground struct {
	config
	fake *fakedriver.Fake
	dir  string
}

func newGround(t *testing.T, c config) *ground {
	t.Helper()
	g := &ground{config: c, fake: fakedriver.Load(t, c.Options), dir: socketDir(t)}
	o := c.Options
	o.AllowLeaks = true // of those that are killed: nothingLeft asks the others
	library, _ := fakedriver.Build(t, o)
	for _, v := range append(fakedriver.Env(t, o), libraryVariable+"="+library, dirVariable+"="+g.dir) {
		if name, value, _ := strings.Cut(v, "="); name != "FAKE_STATE" { // or all would share their books
			t.Setenv(name, value)
		}
	}
	return g
}

func (g *ground) side() (transfertest.Side, error) {
	return g.config.side(g.fake.Path(), g.fake.Runtime(), g.dir)
}

// socketDir returns a directory whose path is short enough for sockets.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipc") //nolint:usetesting // with the test's name in it, it would be too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		noError(t, err)
		return v
	}
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
