//go:build !nogpu && (amd64 || arm64)

package dl

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ebitengine/purego"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/needtest"
)

// errNoCompiler: the library of the tests can't be made.
var errNoCompiler = errors.New("no C compiler: install gcc and libc6-dev, or set CC")

// compiled is testdata/calls.c as a library, for the machine that the test is built for:
// $CC may be a cross compiler.
var compiled = sync.OnceValues(func() ([]byte, error) {
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoCompiler, err)
	}
	dir, err := os.MkdirTemp("", "kvferry-dl-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	out := filepath.Join(dir, "libcalls.so")
	cmd := exec.Command(cc, "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-o", out, "testdata/calls.c")
	if said, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", cc, err, said)
	}
	return os.ReadFile(out)
})

// libraryFile writes the library of the tests, as edit has changed it, to a file of its own.
func libraryFile(tb testing.TB, edit func([]byte)) string {
	tb.Helper()
	b, err := compiled()
	if errors.Is(err, errNoCompiler) {
		needtest.Missing(tb, err.Error())
	}
	if err != nil {
		tb.Fatal(err)
	}
	if edit != nil {
		b = bytes.Clone(b)
		edit(b)
	}
	name := filepath.Join(tb.TempDir(), "libcalls.so")
	if err := os.WriteFile(name, b, 0o666); err != nil {
		tb.Fatal(err)
	}
	return name
}

func library(tb testing.TB) *Library {
	tb.Helper()
	l, err := Open(libraryFile(tb, nil))
	if err != nil {
		tb.Fatal(err)
	}
	return l
}

func find(tb testing.TB, l *Library, symbol string) Func {
	tb.Helper()
	f := l.Find(symbol)
	if f == 0 {
		tb.Fatalf("no %s", symbol)
	}
	return f
}

// numbers are n words, all of them different in their low and in their high half.
func numbers(n int) []uintptr {
	args := make([]uintptr, n)
	for i := range args {
		args[i] = uintptr(i+1)*0x1_0000_0101 + 0x10
	}
	return args
}

// weighted is what sumN makes of args.
func weighted(args []uintptr) uintptr {
	if len(args) == 0 {
		return 42
	}
	var sum uintptr
	for i, a := range args {
		sum += uintptr(i+1) * a
	}
	return sum
}

func TestCall_PassesEveryWordInItsPlace(t *testing.T) {
	l := library(t)
	for n := range MaxArgs + 1 {
		args := numbers(n)
		if got, want := find(t, l, fmt.Sprintf("sum%d", n)).Call(args...), weighted(args); got != want {
			t.Errorf("%d words: got %#x, want %#x", n, got, want)
		}
		// A sum that order does not change would prove nothing.
		for i := range n - 1 {
			swapped := slices.Clone(args)
			swapped[i], swapped[i+1] = swapped[i+1], swapped[i]
			if weighted(swapped) == weighted(args) {
				t.Errorf("%d words: the sum does not see %d and %d change places", n, i, i+1)
			}
		}
	}
}

func TestCall_RefusesMoreWordsThanItPasses(t *testing.T) {
	f := find(t, library(t), "sum14")
	defer func() {
		if recover() == nil {
			t.Error("a word was dropped")
		}
	}()
	f.Call(numbers(MaxArgs + 1)...)
}

func TestCall_KeepsWidthsAndSigns(t *testing.T) {
	l := library(t)
	word := func(i int64) uintptr { return uintptr(i) }
	good := []uintptr{
		word(-1), 0xfffffffe, word(-1 << 63), 0xab, 0x7fffdeadbeef, 0xfedcba9876543210, word(-7), 8, 0x80000009, word(-10),
	}
	mixed := find(t, l, "mixed")
	if got := int32(mixed.Call(good...)); got != 0 {
		t.Errorf("word %d came wrong", got)
	}
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 0x10
		if got := int32(mixed.Call(bad...)); int(got) != i+1 {
			t.Errorf("word %d changed: C saw a change of %d", i+1, got)
		}
	}
	for _, v := range []int32{0, 1, -1, 1<<31 - 1, -1<<31 + 1} {
		// The upper half of a 32-bit word means nothing, in both directions.
		for _, dirt := range []uintptr{0, 0xdeadbeef << 32} {
			if got := int32(find(t, l, "minus").Call(uintptr(uint32(v)) | dirt)); got != -v {
				t.Errorf("minus of %d: got %d", v, got)
			}
		}
	}
	for _, v := range []int64{0, 1, -1, 1<<63 - 1, -1<<63 + 1} {
		if got := int64(find(t, l, "minus64").Call(word(v))); got != -v {
			t.Errorf("minus64 of %d: got %d", v, got)
		}
	}
	if got := find(t, l, "aligned").Call(7); got != 7 {
		t.Errorf("the stack of C is not aligned: got %d", got)
	}
}

func TestCallHandle_PassesSixtyFourBytesByValue(t *testing.T) {
	f := find(t, library(t), "open_handle")
	h, out := newBlock(t, HandleWords), newBlock(t, 3)
	fill := func() {
		for i := range h.Words {
			h.Words[i] = 0xfeedfacecafe<<8 | uint64(0x30+i)
		}
	}
	fill()
	if got := int32(f.CallHandle(out.Addr, h, 0x8001)); got != 0 {
		t.Fatalf("got %d", got)
	}
	var sum uint64
	for i := range HandleWords {
		sum += uint64(i+1) * uint64(0x30+i)
	}
	if out.Words[0] != 0xfeedfacecafe<<8|0x30 || out.Words[1] != sum || uint32(out.Words[2]) != 0x8001 {
		t.Errorf("C saw %#x", out.Words)
	}
	for i := range HandleWords {
		fill()
		h.Words[i] = 0
		if got := int32(f.CallHandle(out.Addr, h, 1)); int(got) != 100+i {
			t.Errorf("word %d is no handle: got %d", i, got)
		}
	}
}

func TestCall_ReadsAndWritesBlocks(t *testing.T) {
	l := library(t)
	b := newBlock(t, 512)
	for i := range 3 {
		if got := find(t, l, "touch").Call(b.Addr + 8*7); got != uintptr(i+1) || b.Words[7] != uint64(i+1) {
			t.Errorf("got %d, and %d in memory", got, b.Words[7])
		}
	}
	b.PutString(11, "libkvferry.so.1")
	if got := find(t, l, "length").Call(b.Addr + 11); got != 15 {
		t.Errorf("C counts %d bytes", got)
	}
	name := find(t, l, "name")
	if got := GoString(name.Call(0)); got != "KVFERRY_SUCCESS" {
		t.Errorf("got %q", got)
	}
	if got := GoString(name.Call(1)); got != "" {
		t.Errorf("NULL reads %q", got)
	}
	if got := GoString(find(t, l, "long_name").Call()); got != strings.Repeat("x", 512) {
		t.Errorf("a long string is cut at %d bytes", len(got))
	}
}

func TestOpen_TakesTheFirstThatOpens(t *testing.T) {
	file := libraryFile(t, nil)
	l, err := Open(filepath.Join(t.TempDir(), "none.so"), file, "libc.so.6")
	if err != nil || l.Name() != file {
		t.Fatalf("got %v, %v", l, err)
	}
	libc, err := Open("libc.so.6")
	if err != nil {
		t.Fatal(err)
	}
	if got := int32(find(t, libc, "getpid").Call()); int(got) != os.Getpid() {
		t.Errorf("libc says pid %d, Go says %d", got, os.Getpid())
	}
	if f := l.Find("sum15"); f != 0 {
		t.Errorf("found sum15 at %#x", f)
	}
	if f := libc.Find("sum14"); f != 0 {
		t.Errorf("libc has sum14 at %#x: libraries see each other", f)
	}
}

func TestOpen_SaysWhatIsWrongWithEach(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text.so")
	if err := os.WriteFile(text, bytes.Repeat([]byte("not a library\n"), 100), 0o666); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(dir, "empty.so")
	if err := os.WriteFile(empty, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	foreign := libraryFile(t, func(b []byte) {
		machine := elf.EM_AARCH64
		if runtime.GOARCH == "arm64" {
			machine = elf.EM_X86_64
		}
		b[18], b[19] = byte(machine), 0 // e_machine
	})
	half := libraryFile(t, func(b []byte) { b[4] = 1 }) // EI_CLASS: 32 bits
	for _, tc := range []struct {
		names []string
		want  []string // in the message, in this order
	}{
		{nil, []string{"library: no name"}},
		{[]string{"libnone-of-kvferry.so.9"}, []string{"libnone-of-kvferry.so.9: cannot open shared object file"}},
		{[]string{"/none/a.so", "/none/b.so"}, []string{"/none/a.so: cannot open", "/none/b.so: cannot open"}},
		{[]string{text}, []string{text, "invalid ELF header"}},
		{[]string{empty}, []string{empty, "file too short"}},
		{[]string{foreign}, []string{foreign, "is for EM_"}},
		{[]string{half}, []string{half, "wrong ELF class"}},
		{[]string{dir}, []string{dir}},
	} {
		l, err := Open(tc.names...)
		if l != nil || !errors.Is(err, fault.NotFound) {
			t.Errorf("%v: got %v, %v", tc.names, l, err)
			continue
		}
		rest := err.Error()
		for _, want := range tc.want {
			at := strings.Index(rest, want)
			if at < 0 {
				t.Errorf("%v: no %q in %q", tc.names, want, err)
				break
			}
			rest = rest[at+len(want):]
		}
	}
}

// The loader does not look for a name without a slash where the user is.
func TestOpen_SaysThatTheFileIsHere(t *testing.T) {
	t.Chdir(filepath.Dir(libraryFile(t, nil)))
	here := filepath.Base(libraryFile(t, nil))
	if _, err := Open(here); !errors.Is(err, fault.NotFound) || !strings.Contains(fault.RemedyOf(err), "write ./"+here) || strings.Count(err.Error(), here) != 1 {
		t.Errorf("%v (%s)", err, fault.RemedyOf(err))
	}
	if _, err := Open("./" + here); err != nil {
		t.Error(err)
	}
	if _, err := Open("libnone-of-kvferry.so"); err == nil || fault.RemedyOf(err) != "" {
		t.Errorf("of a file that is not there: %v (%s)", err, fault.RemedyOf(err))
	}
}

func TestOpen_ErrorsStayWithTheirGoroutine(t *testing.T) {
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			name := fmt.Sprintf("/none/of-goroutine-%d.so", g)
			for range 100 {
				if _, err := Open(name); err == nil || !strings.Contains(err.Error(), name+": cannot open") {
					t.Errorf("got %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestMapped_AndFileSeeWhatWasOpened(t *testing.T) {
	file := libraryFile(t, nil)
	if got := Mapped(filepath.Base(file)); slices.Contains(got, file) {
		t.Fatalf("mapped before it was opened: %v", got)
	}
	l, err := Open(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := Mapped("libcalls"); !slices.Contains(got, file) {
		t.Errorf("%s is not in %v", file, got)
	}
	if got := find(t, l, "sum0").File(); got != file {
		t.Errorf("sum0 lies in %q", got)
	}
	if base := "libc.so.6"; runtime.GOARCH == "amd64" && len(Mapped(base)) != 1 {
		t.Errorf("%s is mapped as %v", base, Mapped(base))
	}
}

func TestCall_FromManyGoroutinesAtOnce(t *testing.T) {
	l := library(t)
	f := find(t, l, "sum14")
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			args := numbers(MaxArgs)
			for i := range 2000 {
				args[i%MaxArgs] = uintptr(g*1_000_003 + i)
				if got, want := f.Call(args...), weighted(args); got != want {
					t.Errorf("goroutine %d, call %d: got %#x, want %#x", g, i, got, want)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestCall_ThatBlocksHoldsNobodyUp(t *testing.T) {
	const goroutines = 100
	meet := find(t, library(t), "meet")
	here := newBlock(t, 1)
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			// It returns when all are in C at the same time.
			if got := int32(meet.Call(here.Addr, goroutines)); got != goroutines {
				t.Errorf("got %d: not all calls were in C at once", got)
			}
		})
	}
	wg.Wait()
}

// deep calls f with the stack n frames deeper, and again on its way back: the stack has
// moved between the calls.
func deep(n int, f func() bool) bool {
	var frame [256]byte
	frame[n%len(frame)] = byte(n)
	ok := n%64 != 0 || f()
	if n > 0 {
		ok = deep(n-1, f) && ok
	}
	return ok && frame[n%len(frame)] == byte(n) && (n%64 != 0 || f())
}

func TestCall_FromStacksThatGrow(t *testing.T) {
	f := find(t, library(t), "sum14")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { // a new goroutine begins with a small stack
			args := numbers(MaxArgs)
			if !deep(4096, func() bool { return f.Call(args...) == weighted(args) }) {
				t.Error("a call came wrong")
			}
			runtime.GC() // gives back what a stack no longer needs: it moves again
			if got := f.Call(args...); got != weighted(args) {
				t.Errorf("after the stack shrank: got %#x", got)
			}
		})
	}
	wg.Wait()
}

func TestCall_AllocatesNothing(t *testing.T) {
	l := library(t)
	f, open := find(t, l, "sum14"), find(t, l, "open_handle")
	h, out := newBlock(t, HandleWords), newBlock(t, 3)
	for name, call := range map[string]func(){
		"Call":       func() { f.Call(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, out.Addr) },
		"CallHandle": func() { open.CallHandle(out.Addr, h, 1) },
	} {
		if n := testing.AllocsPerRun(100, call); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
	// What it would be with purego, whose call is no better than its reputation.
	if n := testing.AllocsPerRun(100, func() { _, _, _ = purego.SyscallN(uintptr(f), numbers(MaxArgs)...) }); n == 0 {
		t.Error("the counter sees no allocation of purego's, so it would see none of ours")
	}
}

// BenchmarkCall is to take at most half the time of BenchmarkSyscallN, in the same run.
func BenchmarkCall(b *testing.B) {
	l := library(b)
	six, eight, fourteen := find(b, l, "sum6"), find(b, l, "sum8"), find(b, l, "sum14")
	b.Run("6", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			six.Call(1, 2, 3, 4, 5, 6)
		}
	})
	b.Run("8", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			eight.Call(1, 2, 3, 4, 5, 6, 7, 8)
		}
	})
	b.Run("14", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			fourteen.Call(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
		}
	})
}

func BenchmarkSyscallN(b *testing.B) {
	l := library(b)
	six, eight, fourteen := uintptr(find(b, l, "sum6")), uintptr(find(b, l, "sum8")), uintptr(find(b, l, "sum14"))
	b.Run("6", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _, _ = purego.SyscallN(six, 1, 2, 3, 4, 5, 6)
		}
	})
	b.Run("8", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _, _ = purego.SyscallN(eight, 1, 2, 3, 4, 5, 6, 7, 8)
		}
	})
	b.Run("14", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _, _ = purego.SyscallN(fourteen, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
		}
	})
}
