package device

import (
	"sync"
	"testing"

	"github.com/kvferry/kvferry/fault"
)

func TestWord_IsCountedWhole(t *testing.T) {
	h := openHost(t, HostOptions{})
	m, err := h.Alloc(24)
	if err != nil {
		t.Fatal(err)
	}
	const each = 1000
	var adders sync.WaitGroup
	for range 4 {
		adders.Go(func() {
			for range each {
				if _, err := m.AddUint64(8, 1<<32+1); err != nil {
					t.Error(err)
				}
				if n, err := m.LoadUint64(8); err != nil || n>>32 != n&(1<<32-1) {
					t.Errorf("half of a sum: %#x, error %v", n, err)
				}
			}
		})
	}
	adders.Wait()
	for off, want := range map[int64]uint64{0: 0, 8: 4 * each * (1<<32 + 1), 16: 0} {
		if n, err := m.LoadUint64(off); n != want || err != nil {
			t.Errorf("the word at %d is %d, error %v; want %d", off, n, err, want)
		}
	}
	for _, off := range []int64{-8, 4, 17, 20, 24, 1 << 62} {
		if _, err := m.LoadUint64(off); fault.KindOf(err) != fault.Invalid {
			t.Errorf("a word at %d: error %v, want kind invalid", off, err)
		}
	}
	if err := m.Free(); err != nil {
		t.Fatal(err)
	}
	if _, err := m.AddUint64(8, 1); fault.KindOf(err) != fault.Closed {
		t.Errorf("a word of freed memory: error %v, want kind closed", err)
	}
	far := NewMemory(MemoryOptions{Device: "far", Base: 4096, Size: 8})
	if _, err := far.LoadUint64(0); fault.KindOf(err) != fault.Unsupported {
		t.Errorf("a word elsewhere: error %v, want kind unsupported", err)
	}
}
