package fakedriver

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
)

// Vendor is whose driver is faked.
type Vendor uint8

// The vendors.
const (
	CUDA Vendor = iota
	HIP
)

func (v Vendor) String() string { return [...]string{"CUDA", "HIP"}[v] }

// Versions that differ in what they export or accept.
const (
	CUDA124 = 12040 // no batches
	CUDA128 = 12080 // batches with 9 arguments
	CUDA130 = 13000 // and with 8

	ROCm64  = 60443484 // no batches
	ROCm72  = 70253211 // batches that must have no attributes
	ROCm713 = 71300000 // batches that may have attributes
)

// Mode says when streams run what they were given.
type Mode uint8

// The modes.
const (
	Random Mode = iota // each operation after a random delay
	Eager              // in the call that queues it, unless it must wait
	Lazy               // when somebody waits for it, has asked repeatedly, or 20 ms are over
)

func (m Mode) String() string { return [...]string{"random", "eager", "lazy"}[m] }

// Options are the choices of a fake. The zero value is a strict one: the newest CUDA, two
// devices, random mode.
type Options struct {
	Vendor  Vendor
	Version int    // 0 means the newest
	Runtime int    // version of the CUDA runtime; 0 means Version
	Devices int    // 0 means 2, less than 0 none
	Visible []int  // which devices the ordinals stand for, as CUDA_VISIBLE_DEVICES has it
	Seed    uint64 // 0 means 1
	Mode    Mode
	// Delay is the middle of the delays of random mode, in microseconds: 0 means 100,
	// less than 0 none.
	Delay int
	// Protect takes the caller's access to pages of pinned and registered memory while
	// a copy owns them: all access to what will be written, writes to what will be read.
	// Only shared mappings can be protected, and only whole OS pages.
	Protect bool
	// AllowPageable makes copies of pageable memory legal: counted, and slow.
	AllowPageable bool
	// Sonames gives the libraries the names that the real ones are looked for by, so that
	// a process finds them by LD_LIBRARY_PATH.
	Sonames bool
	// AllowViolations and AllowLeaks keep the end of the test from failing for them.
	AllowViolations, AllowLeaks bool
	// Settings are options of the library, by name: see control.c.
	Settings map[string]string
}

// settings are the options as the library takes them, in an order that is always the same.
func (o Options) settings() (s [][2]string) {
	set := func(name string, value any) { s = append(s, [2]string{name, fmt.Sprint(value)}) }
	set("mode", o.Mode)
	if o.Devices != 0 {
		set("devices", max(0, o.Devices))
	}
	if len(o.Visible) > 0 {
		set("visible", strings.Trim(strings.ReplaceAll(fmt.Sprint(o.Visible), " ", ","), "[]"))
	}
	if o.Seed != 0 {
		set("seed", o.Seed)
	}
	if o.Delay != 0 {
		set("delay_us", max(0, o.Delay))
	}
	if o.Protect {
		set("protect", 1)
	}
	if o.AllowPageable {
		set("pageable", 1)
	}
	for _, name := range slices.Sorted(maps.Keys(o.Settings)) {
		set(name, o.Settings[name])
	}
	return s
}

func (o Options) version() int {
	switch {
	case o.Version != 0:
		return o.Version
	case o.Vendor == HIP:
		return ROCm713
	default:
		return CUDA130
	}
}

// Fake is one loaded driver with state of its own: tests may have several, one beside the
// other. All methods may be called from any goroutine.
type Fake struct {
	tb            testing.TB
	options       Options
	path, runtime string
	lib           *dl.Library

	mu      sync.Mutex
	scratch *dl.Block // arguments; guarded by mu
}

const scratchWords = 8192

// Load builds and loads a fake driver. The end of the test fails it for what the fake has
// noted, and for what was not given back.
func Load(tb testing.TB, o Options) *Fake {
	tb.Helper()
	f := &Fake{tb: tb, options: o}
	f.path, f.runtime = Build(tb, o)
	f.lib = open(tb, f.path)
	var err error
	f.scratch, err = dl.NewBlock(scratchWords)
	check(tb, err)
	for _, s := range o.settings() {
		f.Set(s[0], s[1])
	}
	if f.runtime != "" {
		f.scratch.PutString(0, f.path)
		if int32(open(tb, f.runtime).Find("fakeBindDriver").Call(f.scratch.Addr)) != 0 {
			tb.Fatalf("%s does not load %s", f.runtime, f.path)
		}
	}
	tb.Cleanup(f.end)
	return f
}

func open(tb testing.TB, path string) *dl.Library {
	tb.Helper()
	lib, err := dl.Open(path)
	if errors.Is(err, fault.Unsupported) {
		tb.Skip(err)
	}
	check(tb, err)
	return lib
}

func (f *Fake) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.options.AllowViolations {
		for _, v := range f.violations() {
			f.tb.Errorf("%s: %s", f.options.Vendor, v)
		}
	}
	if c := f.counts(); !f.options.AllowLeaks && c.Leaks() != "" {
		f.tb.Errorf("%s: left behind: %s", f.options.Vendor, c.Leaks())
	}
	f.scratch.Free()
}

// Path is the driver's file.
func (f *Fake) Path() string { return f.path }

// Runtime is the file of the CUDA runtime over this driver, "" with HIP.
func (f *Fake) Runtime() string { return f.runtime }

// Find returns a function of the library, which must have it.
func (f *Fake) Find(symbol string) dl.Func {
	f.tb.Helper()
	fn := f.lib.Find(symbol)
	if fn == 0 {
		f.tb.Fatalf("%s has no %s", f.path, symbol)
	}
	return fn
}

// Has reports whether the library exports a symbol.
func (f *Fake) Has(symbol string) bool { return f.lib.Find(symbol) != 0 }

// Set sets an option of the library by its name.
func (f *Fake) Set(name, value string) {
	f.tb.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.scratch.PutString(0, name)
	f.scratch.PutString(512, value)
	if uint32(f.Find("fakeSet").Call(f.scratch.Addr, f.scratch.Addr+512)) == 0 {
		f.tb.Fatalf("the fake has no option %q", name)
	}
}

// SetMode changes when streams run.
func (f *Fake) SetMode(m Mode) { f.Set("mode", m.String()) }

// SetDelay changes the middle of the delays, in microseconds.
func (f *Fake) SetDelay(microseconds int) { f.Set("delay_us", strconv.Itoa(microseconds)) }

// Hold keeps a stream from running anything until release is called, which may be done
// twice. A copy that runs at the time ends first.
func (f *Fake) Hold(stream uintptr) (release func()) {
	f.tb.Helper()
	if code := int32(f.Find("fakeHold").Call(stream)); code != 0 {
		f.tb.Fatalf("hold: %#x is no stream", stream)
	}
	return sync.OnceFunc(func() { f.Find("fakeRelease").Call(stream) })
}

// Queued returns how many operations a stream has not ended.
func (f *Fake) Queued(stream uintptr) int { return int(f.Find("fakeQueued").Call(stream)) }

// FailCopy makes the nth copy (from 1) that the stream begins from now on fail, and with it
// the device: half of the destinations is not written, and every later call returns code.
func (f *Fake) FailCopy(stream uintptr, nth, code int) {
	f.tb.Helper()
	if int32(f.Find("fakeFailCopy").Call(stream, uintptr(nth), uintptr(code))) != 0 {
		f.tb.Fatalf("fail a copy: %#x is no stream", stream)
	}
}

// FailCall makes the nth call (from 1) of a function from now on return code and do
// nothing.
func (f *Fake) FailCall(name string, nth, code int) {
	f.tb.Helper()
	f.Set("fail", fmt.Sprintf("%s:%d:%d", name, nth, code))
}

// Lose makes a device fail: what is queued is dropped, and every later call returns code.
func (f *Fake) Lose(device, code int) { f.Find("fakeLose").Call(uintptr(device), uintptr(code)) }

// Expire makes the contexts that threads have set void, as if all threads were new ones:
// who calls the driver without setting it again has relied on somebody else's, which is
// found by chance only when threads keep theirs. Call it where no call is under way.
func (f *Fake) Expire() { f.Find("fakeExpire").Call() }

// Calls returns how often a function was called.
func (f *Fake) Calls(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.scratch.PutString(0, name)
	return int(f.Find("fakeCalls").Call(f.scratch.Addr))
}

// Peek returns what memory holds now, whoever owns it: it waits for nothing, and device
// memory needs no copy.
func (f *Fake) Peek(addr uintptr, n int) []byte {
	f.tb.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	got := make([]byte, 0, n)
	for len(got) < n {
		part := min(n-len(got), len(f.scratch.Bytes))
		if int32(f.Find("fakePeek").Call(addr+uintptr(len(got)), f.scratch.Addr, uintptr(part))) != 0 {
			f.tb.Fatalf("peek: %#x is not readable", addr)
		}
		got = append(got, f.scratch.Bytes[:part]...)
	}
	return got
}

// Poke writes memory, as Peek reads it.
func (f *Fake) Poke(addr uintptr, b []byte) {
	f.tb.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for done := 0; done < len(b); {
		n := copy(f.scratch.Bytes, b[done:])
		if int32(f.Find("fakePoke").Call(addr+uintptr(done), f.scratch.Addr, uintptr(n))) != 0 {
			f.tb.Fatalf("poke: %#x is not writable", addr)
		}
		done += n
	}
}

// Violations returns what the fake has noted.
func (f *Fake) Violations() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.violations()
}

func (f *Fake) violations() (all []string) {
	get := f.Find("fakeViolation")
	for i := uintptr(0); ; i++ {
		text := get.Call(i)
		if text == 0 {
			return all
		}
		all = append(all, dl.GoString(text))
	}
}

// Expect wants a violation that contains each of the texts, and forgets all that there are.
func (f *Fake) Expect(texts ...string) {
	f.tb.Helper()
	all := f.Violations()
	for _, text := range texts {
		if !slices.ContainsFunc(all, func(v string) bool { return strings.Contains(v, text) }) {
			f.tb.Errorf("no violation says %q: %q", text, all)
		}
	}
	f.Forgive()
}

// Forgive forgets the violations.
func (f *Fake) Forgive() { f.Find("fakeForgive").Call() }

// Counts returns what is live, and what was done.
func (f *Fake) Counts() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts()
}

func (f *Fake) counts() Counts {
	f.Find("fakeCounts").Call(f.scratch.Addr, uintptr(countFields))
	return countsOf(f.scratch.Words)
}
