package ceiling

import (
	"bytes"
	"context"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

func TestPieces_GoRoundBothMemoriesAndTurnTheDirection(t *testing.T) {
	a, b := make([]byte, 300), make([]byte, 100)
	rows := Pieces(a, b, 450)
	if len(rows) != 4 || Bytes(rows) != 400 {
		t.Fatalf("%d pieces of %d bytes in all", len(rows), Bytes(rows))
	}
	for i, r := range rows {
		inA, inB := r.Dst, r.Src
		if i%2 == 0 {
			inA, inB = inB, inA
		}
		if &inA[0] != &a[i%3*100] || &inB[0] != &b[0] {
			t.Errorf("piece %d lies elsewhere", i)
		}
	}
	for _, limit := range []int{0, -1} {
		if rows := Pieces(a, b, limit); rows != nil {
			t.Errorf("limit %d: %d pieces", limit, len(rows))
		}
	}
	if rows := Pieces(nil, b, 100); rows != nil {
		t.Errorf("no memory: %d pieces", len(rows))
	}
}

func TestAppendPages_CopiesEveryByteOfThePagesAndNoOther(t *testing.T) {
	c := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 3, Pages: 5, PageSize: 4, KVHeads: 2, HeadDim: 8}
	from, err := c.LayerMajor()
	if err != nil {
		t.Fatal(err)
	}
	to, err := c.PageMajor()
	if err != nil {
		t.Fatal(err)
	}
	src := bytes.Repeat([]byte{7}, int(from.Bytes()))
	dst := make([]byte, to.Bytes())
	s, err := kv.Wrap(from, []*device.Memory{device.WrapHost(src)})
	if err != nil {
		t.Fatal(err)
	}
	d, err := kv.Wrap(to, []*device.Memory{device.WrapHost(dst)})
	if err != nil {
		t.Fatal(err)
	}
	r, err := kv.NewRoute(d, s)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := AppendPages(nil, r, page.Pair{Dst: 1, Src: 4}, page.Pair{Dst: 3, Src: 0})
	if err != nil {
		t.Fatal(err)
	}
	if Rate(context.Background(), rows, 1) <= 0 {
		t.Error("no rate")
	}
	n := int(to.PageBytes())
	for p := range 5 {
		want := byte(0)
		if p == 1 || p == 3 {
			want = 7
		}
		if got := dst[p*n : (p+1)*n]; !bytes.Equal(got, bytes.Repeat([]byte{want}, n)) {
			t.Errorf("page %d: want all %d", p, want)
		}
	}
	if _, err := AppendPages(nil, r, page.Pair{Dst: 5, Src: 0}); err == nil {
		t.Error("a page out of range passed")
	}
}

func TestRate_IsZeroWhenItsContextHasEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if got := Rate(ctx, []Row{{make([]byte, 1), make([]byte, 1)}}, 3); got != 0 {
		t.Errorf("got %v", got)
	}
}
