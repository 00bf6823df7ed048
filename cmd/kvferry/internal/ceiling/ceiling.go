// Package ceiling knows the two yardsticks that copies are held against.
//
// C is Go's copy of 64 MiB pieces: what memory allows. R is a bare loop over the
// very rows that a copy of pages is made of, with no bookkeeping: what those rows
// allow. Both are lists of rows that [Copy] goes through on the calling thread.
//
// Rows point into memory outside the Go heap: they are dangling once it is freed.
package ceiling

import (
	"context"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// PieceBytes is the size of a piece of C.
const PieceBytes = 64 << 20

// Row is one bare copy; both sides are equally long.
type Row struct{ Dst, Src []byte }

// Bytes returns the bytes of all rows.
func Bytes(rows []Row) (n int64) {
	for _, r := range rows {
		n += int64(len(r.Dst))
	}
	return n
}

// Copy copies the rows in their order.
func Copy(rows []Row) {
	for _, r := range rows {
		copy(r.Dst, r.Src)
	}
}

// MaxRows is how many rows a yardstick has at most: the list takes memory too.
const MaxRows = 1 << 16

// Pieces returns copies between a and b of pieces as large as both allow, at most
// [PieceBytes], and of at most limit bytes and [MaxRows] pieces in all. Pieces go round both memories,
// and the direction alternates.
func Pieces(a, b []byte, limit int) (rows []Row) {
	n := min(PieceBytes, len(a), len(b), limit)
	if n <= 0 {
		return nil
	}
	for i := range min(limit/n, MaxRows) {
		x, y := piece(a, n, i), piece(b, n, i)
		if i%2 == 0 {
			x, y = y, x
		}
		rows = append(rows, Row{Dst: x, Src: y})
	}
	return rows
}

// piece is the i-th piece of n bytes of b.
func piece(b []byte, n, i int) []byte {
	at := i % (len(b) / n) * n
	return b[at : at+n]
}

// AppendOps appends the rows of ops.
func AppendOps(rows []Row, ops []device.Op) []Row {
	for _, op := range ops {
		rows = append(rows, Row{op.Dst.Bytes()[op.DstOff:][:op.Bytes], op.Src.Bytes()[op.SrcOff:][:op.Bytes]})
	}
	return rows
}

// AppendPageOps appends the ops that copy pairs of pages along r, one page after the
// other. Kinds: those of kv.Route.AppendBoxes.
func AppendPageOps(ops []device.Op, r *kv.Route, pairs ...page.Pair) ([]device.Op, error) {
	var boxes []kv.Box
	var err error
	for _, p := range pairs {
		if boxes, err = r.AppendBoxes(boxes[:0], page.Run{Dst: p.Dst, Src: p.Src, N: 1}); err != nil {
			return ops, err
		}
		ops = r.AppendOps(ops, boxes)
	}
	return ops, nil
}

// AppendPages appends the rows of [AppendPageOps].
func AppendPages(rows []Row, r *kv.Route, pairs ...page.Pair) ([]Row, error) {
	ops, err := AppendPageOps(nil, r, pairs...)
	if err != nil {
		return rows, err
	}
	return AppendOps(rows, ops), nil
}

// Rate copies the rows a few times and returns the best rate in GB/s: what runs
// beside a pass can only slow it, and a ceiling must not be too low. It is 0 when
// ctx has ended.
func Rate(ctx context.Context, rows []Row, passes int) float64 {
	bytes, best := Bytes(rows), 0.0
	for range passes {
		if ctx.Err() != nil {
			return 0
		}
		began := time.Now()
		Copy(rows)
		best = max(best, float64(bytes)/time.Since(began).Seconds()/1e9)
	}
	return best
}
