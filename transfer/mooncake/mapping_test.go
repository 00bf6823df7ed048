package mooncake

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// pieced returns memory of several memfds.
func pieced(t *testing.T, size int64) *device.Memory {
	t.Helper()
	h, err := device.OpenHost(device.HostOptions{PieceBytes: int64(os.Getpagesize())})
	if err != nil {
		t.Fatal(err)
	}
	m, err := h.Alloc(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Free(), h.Close()); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestMapRegion_IsTheSameMemory(t *testing.T) {
	size := int64(3*os.Getpagesize() + 100)
	m := pieced(t, size)
	for i := range m.Bytes() {
		m.Bytes()[i] = byte(i * 31 >> 4)
	}
	var o ones
	defer o.close()
	for _, write := range []bool{false, true} {
		pieces, fds, err := piecesOf(m, write)
		if err != nil {
			t.Fatal(err)
		}
		r, err := mapRegion(size, pieces, fds, write)
		closeAll(fds)
		if err != nil {
			t.Fatal(err)
		}
		if len(pieces) != 4 || !bytes.Equal(r.pages[:size], m.Bytes()) {
			t.Errorf("%d pieces are not the memory's bytes", len(pieces))
		}
		if write {
			r.pages[size-1] ^= 0xff
			if m.Bytes()[size-1] != r.pages[size-1] {
				t.Error("what is written is not seen")
			}
		}
		before := bytes.Clone(m.Bytes())
		if err := r.vacate(&o); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(r.pages[:size], bytes.Repeat([]byte{0xff}, int(size))) || !bytes.Equal(before, m.Bytes()) {
			t.Error("what is vacated is not ones, or is still the memory")
		}
		r.unmap()
	}
}

// What peers may read is a mapping that can't be made writable, either.
func TestMapRegion_ForReadingStaysSo(t *testing.T) {
	m := pieced(t, int64(os.Getpagesize()))
	pieces, fds, err := piecesOf(m, false)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(fds)
	r, err := mapRegion(m.Size(), pieces, fds, false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.unmap()
	if err := unix.Mprotect(r.pages, unix.PROT_READ|unix.PROT_WRITE); err != unix.EACCES {
		t.Errorf("mprotect: error %v, want %v", err, unix.EACCES)
	}
}

func TestMapRegion_Refuses(t *testing.T) {
	osPage := int64(os.Getpagesize())
	m := pieced(t, 2*osPage)
	pieces, fds, err := piecesOf(m, false)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(fds)
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if err := file.Truncate(2 * osPage); err != nil {
		t.Fatal(err)
	}
	open, err := unix.MemfdCreate("open", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(open) }()
	if err := unix.Ftruncate(open, 2*osPage); err != nil {
		t.Fatal(err)
	}
	one := []piece{{0, 0, 2 * osPage}}
	for name, x := range map[string]struct {
		size   int64
		pieces []piece
		fds    []int
	}{
		"nothing":                 {0, nil, nil},
		"no pieces":               {osPage, nil, nil},
		"too few descriptors":     {2 * osPage, pieces, fds[:1]},
		"too large":               {maxRegionBytes + 1, []piece{{0, 0, maxRegionBytes + 1}}, fds[:1]},
		"more than there is":      {2 * osPage, one, fds[:1]},
		"beyond the file":         {osPage, []piece{{0, osPage, osPage}}, fds[:1]},
		"a gap":                   {2 * osPage, []piece{{0, 0, 1}, {osPage, 0, osPage}}, fds},
		"pieces that overlap":     {2 * osPage, []piece{{0, 0, osPage}, {0, 0, osPage}}, fds},
		"too short":               {2 * osPage, pieces[:1], fds[:1]},
		"in the middle of a page": {osPage, []piece{{0, 8, osPage - 8}}, fds[:1]},
		"a file":                  {2 * osPage, one, []int{int(file.Fd())}},
		"memory that can shrink":  {2 * osPage, one, []int{open}},
		"a closed descriptor":     {2 * osPage, one, []int{1 << 20}},
	} {
		if r, err := mapRegion(x.size, x.pieces, x.fds, false); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v, error %v, want kind invalid", name, r, err)
		}
	}
	if _, _, err := piecesOf(device.WrapHost(make([]byte, 100)), false); !errors.Is(err, fault.Unsupported) || fault.RemedyOf(err) == "" {
		t.Errorf("wrapped memory: error %v, want kind unsupported and a remedy", err)
	}
}

// What was vacated costs its memory once, however often an owner comes and goes.
func TestVacate_SharesItsOnes(t *testing.T) {
	m := pieced(t, int64(os.Getpagesize()))
	var o ones
	defer o.close()
	inodes := map[string]bool{}
	for range 3 {
		pieces, fds, err := piecesOf(m, false)
		if err != nil {
			t.Fatal(err)
		}
		r, err := mapRegion(m.Size(), pieces, fds, false)
		closeAll(fds)
		if err != nil {
			t.Fatal(err)
		}
		defer r.unmap()
		if err := r.vacate(&o); err != nil {
			t.Fatal(err)
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if f := strings.Fields(line); len(f) > 5 && strings.HasPrefix(f[5], "/memfd:kvferry-vacated") {
			inodes[f[4]] = true
		}
	}
	if len(inodes) != 1 {
		t.Errorf("%d memories of ones", len(inodes))
	}
}
