package gpu

import (
	"testing"
	"testing/fstest"

	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestNUMANode_IsMinus1WhenNobodyKnows(t *testing.T) {
	const dir = "sys/bus/pci/devices/0000:3b:00.0/"
	for text, want := range map[string]int{"1\n": 1, "0": 0, "-1\n": -1, "": -1, "none": -1} {
		root := fstest.MapFS{dir + "numa_node": {Data: []byte(text)}}
		if got := NUMANode(root, "0000:3B:00.0"); got != want {
			t.Errorf("%q is node %d, want %d", text, got, want)
		}
	}
	for _, pci := range []string{"", "..", "0000:3c:00.0", "/"} {
		if got := NUMANode(fstest.MapFS{dir + "numa_node": {Data: []byte("1")}}, pci); got != -1 {
			t.Errorf("the card at %q is at node %d", pci, got)
		}
	}
}

func TestFormatUUID_IsAsTheVendorsWriteIt(t *testing.T) {
	for id, want := range map[[16]byte]string{
		{}: "",
		{0x8f, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff}: "GPU-8f010203-0405-0607-0809-0a0b0c0d0eff",
		[16]byte([]byte("4b5f2a9e1c0d3f77")):                        "GPU-4b5f2a9e1c0d3f77",
	} {
		if got := formatUUID(id); got != want {
			t.Errorf("%x is %q, want %q", id, got, want)
		}
	}
}
