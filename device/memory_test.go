package device

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
)

func openHost(t testing.TB, o HostOptions) *Host {
	t.Helper()
	h, err := OpenHost(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func alloc(t testing.TB, h *Host, bytes, cut int64) *Memory {
	t.Helper()
	m, err := h.AllocPieces(bytes, cut)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Free(); err != nil && !errors.Is(err, fault.Closed) {
			t.Error(err)
		}
	})
	return m
}

func wantKind(t *testing.T, err error, kind fault.Kind) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got error %v, want kind %q", err, kind)
	}
}

func TestHost_RefusesPiecesOfImpossibleSize(t *testing.T) {
	for _, n := range []int64{-1, 1, 4095, 64<<30 + 1} {
		_, err := OpenHost(HostOptions{PieceBytes: n})
		wantKind(t, err, fault.Invalid)
	}
}

func TestHost_PiecesAreSealedFilesBehindOneRange(t *testing.T) {
	h := openHost(t, HostOptions{PieceBytes: 64 << 10})
	const size = 200<<10 + 1234
	m := alloc(t, h, size, 1)
	if len(m.Pieces()) != 4 {
		t.Fatalf("%d pieces, want 4", len(m.Pieces()))
	}
	for i := range m.Bytes() {
		m.Bytes()[i] = byte(i * 7 >> 3)
	}
	for _, p := range m.Pieces() {
		got := make([]byte, p.Bytes)
		if _, err := unix.Pread(p.FD, got, p.FileOff); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, m.Bytes()[p.Off:][:p.Bytes]) {
			t.Errorf("piece at %d: the file holds other bytes than the memory", p.Off)
		}
		seals, err := unix.FcntlInt(uintptr(p.FD), unix.F_GET_SEALS, 0)
		if want := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL; err != nil || seals&want != want {
			t.Errorf("piece at %d: seals %#x (error %v), want %#x among them", p.Off, seals, err, want)
		}
		if err := unix.Ftruncate(p.FD, 0); err != unix.EPERM {
			t.Errorf("piece at %d: shrinking it gives %v, want %v", p.Off, err, unix.EPERM)
		}
		flags, err := unix.FcntlInt(uintptr(p.FD), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("piece at %d: it survives exec", p.Off)
		}
		name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", p.FD))
		if err != nil || !strings.Contains(name, "kvferry-host-") {
			t.Errorf("piece at %d: it is called %q (error %v)", p.Off, name, err)
		}
	}
}

func TestHost_FreeUnmapsAndCloses(t *testing.T) {
	h := openHost(t, HostOptions{PieceBytes: 64 << 10})
	m := alloc(t, h, 200<<10, 1)
	if leaktest.HostMemory() == nil {
		t.Fatal("HostMemory does not see a memory that is there")
	}
	if err := m.Free(); err != nil {
		t.Fatal(err)
	}
	if err := leaktest.HostMemory(); err != nil {
		t.Error(err)
	}
	if m.Bytes() != nil {
		t.Error("a freed memory still has bytes")
	}
	wantKind(t, m.Populate(0, 1), fault.Closed)
}

func TestHost_RefusesImpossibleCuts(t *testing.T) {
	h := openHost(t, HostOptions{})
	for _, cut := range []int64{0, -1} {
		_, err := h.AllocPieces(100, cut)
		wantKind(t, err, fault.Invalid)
	}
}

func TestHost_RefusesMoreMemoryThanThereIsAndSaysHowMuch(t *testing.T) {
	h := openHost(t, HostOptions{})
	there, err := AvailableMemory()
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Alloc(there + there/4)
	wantKind(t, err, fault.Memory)
	if !strings.Contains(err.Error(), fmt.Sprint(there+there/4)) || fault.RemedyOf(err) == "" {
		t.Errorf("error %q with remedy %q: want the number and a remedy", err, fault.RemedyOf(err))
	}
	if err := leaktest.HostMemory(); err != nil {
		t.Error("refused, and yet there is", err)
	}
}

func TestHost_PromisesTheSameMemoryOnlyOnce(t *testing.T) {
	h := openHost(t, HostOptions{})
	there, err := AvailableMemory()
	if err != nil {
		t.Fatal(err)
	}
	m := alloc(t, h, there/2, 1) // address space: nothing touches it
	_, err = h.Alloc(there / 4 * 3)
	wantKind(t, err, fault.Memory)
	if err := m.Free(); err != nil {
		t.Fatal(err)
	}
	alloc(t, h, there/4*3, 1)
}

func TestHost_CountsPopulatedMemoryOnce(t *testing.T) {
	h := openHost(t, HostOptions{})
	const size = 1 << 20
	m, other := alloc(t, h, size, 1), alloc(t, h, size, 1)
	if got := h.promised(); got != 2*size {
		t.Errorf("%d bytes are promised before use, want %d", got, 2*size)
	}
	if err := m.Populate(0, size); err != nil {
		t.Fatal(err)
	}
	if got := h.promised(); got != size {
		t.Errorf("%d bytes are promised when half are populated, want %d", got, size)
	}
	if err := other.Free(); err != nil {
		t.Fatal(err)
	}
	if got := h.promised(); got != 0 {
		t.Errorf("%d bytes are promised when none are left, want 0", got)
	}
}

func TestHost_CloseSaysWhatIsOpen(t *testing.T) {
	h := openHost(t, HostOptions{})
	alloc(t, h, 3<<20, 1)
	s, err := h.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	err = h.Close()
	wantKind(t, err, fault.Busy)
	if !strings.Contains(err.Error(), "1 memories (3.0 MiB) and 1 streams") {
		t.Errorf("error %q does not say what is open", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestMemory_PopulateChangesNoByteAndTouchesWhatWasAsked(t *testing.T) {
	h := openHost(t, HostOptions{PieceBytes: 64 << 10})
	page := int64(os.Getpagesize())
	for _, c := range []struct{ off, n, pages int64 }{
		{0, 0, 0}, {0, 1, 1}, {page - 1, 2, 2}, {page, page, 1}, {60 << 10, 8 << 10, 2}, {0, 200 << 10, 50}, {200<<10 - 1, 1, 1},
	} {
		for name, populate := range map[string]func(m *Memory) error{
			"populate": func(m *Memory) error { return m.Populate(c.off, c.n) },
			"touch": func(m *Memory) error {
				touch(m.bytes[c.off/page*page : c.off+c.n])
				return nil
			},
		} {
			m := alloc(t, h, 200<<10, 1)
			m.bytes[100] = 42
			before := m.resident()
			if c.off < page && c.n > 0 {
				before = 0 // the first page is among those asked for
			}
			if err := populate(m); err != nil {
				t.Fatal(err)
			}
			if page == 4096 && !h.huge && m.resident() != before+c.pages*page {
				t.Errorf("%s %+v: %d bytes resident, want %d", name, c, m.resident(), before+c.pages*page)
			}
			for i, b := range m.bytes {
				if b != 0 && i != 100 || i == 100 && b != 42 {
					t.Fatalf("%s %+v: byte %d is %d", name, c, i, b)
				}
			}
			if err := m.Free(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestMemory_PopulateChecksItsRange(t *testing.T) {
	m := alloc(t, openHost(t, HostOptions{}), 100, 1)
	for _, c := range [][2]int64{{-1, 1}, {0, -1}, {0, 101}, {101, 0}, {1, 1<<63 - 1}, {1<<63 - 1, 1}} {
		wantKind(t, m.Populate(c[0], c[1]), fault.Invalid)
	}
}

func TestMemory_TouchLosesNoConcurrentWrite(t *testing.T) {
	m := alloc(t, openHost(t, HostOptions{}), 16<<10, 1)
	var both sync.WaitGroup
	var over atomic.Bool
	both.Go(func() {
		defer over.Store(true)
		for range 50_000 {
			touch(m.bytes)
		}
	})
	both.Go(func() {
		for i := 0; !over.Load(); i++ {
			for off := 0; off < len(m.bytes); off += os.Getpagesize() {
				if m.bytes[off+1] != byte(i) {
					t.Errorf("write %d is lost", i)
					return
				}
				m.bytes[off+1]++
			}
		}
	})
	both.Wait()
}

func TestMemory_WrappedBytesAreOnlyBorrowed(t *testing.T) {
	b := []byte("somebody else's")
	m := WrapHost(b)
	if m.Size() != int64(len(b)) || &m.Bytes()[0] != &b[0] || m.Pieces() != nil || m.OSPageBytes() != os.Getpagesize() {
		t.Errorf("wrapped %d bytes: size %d, pieces %v, OS page %d", len(b), m.Size(), m.Pieces(), m.OSPageBytes())
	}
	if err := m.Populate(0, m.Size()); err != nil {
		t.Error(err)
	}
	if err := m.Free(); err != nil {
		t.Error(err)
	}
	if string(b) != "somebody else's" {
		t.Errorf("freed wrapped memory, and its bytes are %q", b)
	}
	wantKind(t, m.Free(), fault.Closed)
	if WrapHost(nil).Bytes() == nil {
		t.Error("wrapped nothing, and the host cannot address it")
	}
}

func TestMemory_OSPageIsHugeOnlyWhenMappedSo(t *testing.T) {
	const smaps = `7f0000000000-7f0000400000 rw-s 00000000 00:01 9 /memfd:kvferry-host-0 (deleted)
Size:               4096 kB
Rss:                4096 kB
ShmemPmdMapped:     2048 kB
VmFlags: rd wr sh mr mw me ms dd hg
7f0000400000-7f0000800000 rw-s 00000000 00:01 10 /memfd:kvferry-host-1 (deleted)
Rss:                2048 kB
ShmemPmdMapped:     2048 kB
7f0000800000-7f0000a00000 rw-s 00000000 00:01 11 /memfd:other (deleted)
Rss:                2048 kB
ShmemPmdMapped:        0 kB
`
	for _, c := range []struct {
		lo, hi    uint64
		rss, huge int64
	}{
		{0x7f0000000000, 0x7f0000800000, 6144, 4096},
		{0x7f0000400000, 0x7f0000800000, 2048, 2048},
		{0x7f0000800000, 0x7f0000a00000, 2048, 0},
		{0x7f0000a00000, 0x7f0000c00000, 0, 0},
	} {
		if rss, huge := mapped(strings.NewReader(smaps), c.lo, c.hi); rss != c.rss || huge != c.huge {
			t.Errorf("mapped(%#x, %#x) = %d, %d KiB, want %d, %d", c.lo, c.hi, rss, huge, c.rss, c.huge)
		}
	}
	// This kernel's own answer: never huge where shared memory has no huge pages.
	h := openHost(t, HostOptions{})
	m := alloc(t, h, 4<<20, 1)
	if err := m.Populate(0, m.Size()); err != nil {
		t.Fatal(err)
	}
	if got := m.OSPageBytes(); got != os.Getpagesize() && (got != hugeBytes || !h.huge) {
		t.Errorf("OS page is %d, huge pages allowed: %v", got, h.huge)
	}
}

func TestHost_SeesWhetherSharedMemoryMayBeHuge(t *testing.T) {
	const file = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
	for text, want := range map[string]bool{
		"always within_size [advise] never deny force": true,
		"[always] within_size advise never deny force": true,
		"always within_size advise [never] deny force": false,
		"always within_size advise never [deny] force": false,
		"": false, "always": false,
	} {
		if got := shmemHuge(fstest.MapFS{file: {Data: []byte(text)}}); got != want {
			t.Errorf("shmemHuge(%q) = %v, want %v", text, got, want)
		}
	}
	if shmemHuge(fstest.MapFS{}) {
		t.Error("huge pages on a kernel that does not know them")
	}
}

func TestCutPieces_EndWherePagesEnd(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		name              string
		bytes, cut, limit int64
		units             []int64
		want              []int64 // lengths
	}{
		{"one piece is enough", 10, 1, 4096, []int64{4096}, []int64{10}},
		{"limit itself", 8192, 1, 4096, []int64{4096}, []int64{4096, 4096}},
		{"limit is no multiple", 8192, 1, 5000, []int64{4096}, []int64{4096, 4096}},
		{"cut of 3 OS pages", 8 * 4096, 3 * 4096, 4 * 4096, []int64{4096}, []int64{3 * 4096, 3 * 4096, 2 * 4096}},
		{"cut that meets the OS page late", 30000, 6144, 3 * 6144, []int64{4096}, []int64{12288, 12288, 5424}},
		{"huge pages and cuts meet", 20 * mib, 3 * mib, 7 * mib, []int64{2 * mib, 4096}, []int64{6 * mib, 6 * mib, 6 * mib, 2 * mib}},
		{"cuts matter more than huge pages", 10 * mib, 3 * mib, 5 * mib, []int64{2 * mib, 4096}, []int64{3 * mib, 3 * mib, 3 * mib, 1 * mib}},
		{"no such piece: huge pages alone", 10 * mib, 6 * mib, 5 * mib, []int64{2 * mib, 4096}, []int64{4 * mib, 4 * mib, 2 * mib}},
		{"small pieces: OS pages alone", 10000, 1, 4096, []int64{2 * mib, 4096}, []int64{4096, 4096, 1808}},
		{"cut beyond all", 10000, 1<<63 - 1, 8192, []int64{4096}, []int64{8192, 1808}},
	} {
		var got []int64
		for _, p := range cutPieces(c.bytes, c.cut, c.limit, c.units) {
			got = append(got, p.Bytes)
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestCutPieces_CoverTheMemoryOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const page = 4096
		bytes := rapid.Int64Range(1, 1<<24).Draw(t, "bytes")
		cut := rapid.Int64Range(1, 1<<18).Draw(t, "cut")
		limit := rapid.Int64Range(64<<10, 1<<26).Draw(t, "limit")
		pieces := cutPieces(bytes, cut, limit, []int64{page})
		end := int64(0)
		for i, p := range pieces {
			if p.Off != end || p.Bytes < 1 || p.Bytes > limit || p.FileOff != 0 {
				t.Fatalf("piece %d is %+v, want it from %d, of 1 to %d bytes", i, p, end, limit)
			}
			end += p.Bytes
			if i == len(pieces)-1 {
				break
			}
			if end%page != 0 {
				t.Fatalf("piece %d ends at %d, inside an OS page", i, end)
			}
			// The slow way to ask whether pieces could end on cuts at all.
			possible := false
			for n := cut; n <= limit && !possible; n += cut {
				possible = n%page == 0
			}
			if possible && end%cut != 0 {
				t.Fatalf("piece %d ends at %d, inside a page of %d", i, end, cut)
			}
		}
		if end != bytes {
			t.Fatalf("the pieces have %d bytes, want %d", end, bytes)
		}
	})
}
