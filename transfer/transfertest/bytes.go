package transfertest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// The cases about which bytes arrive.

// ranges reads each kind of range with each pair of geometries.
func ranges(b *bench) error {
	for _, x := range shapes() {
		r := b.rig(x.local, x.far)
		size := r.cache.PageSize()
		n := 6
		for _, tokens := range [][2]int{
			{0, 0},                       // nothing
			{3 * size, 3 * size},         // nothing, in the middle
			{5, 3},                       // nothing
			{0, 1},                       // one token
			{size - 1, size},             // the last of a page
			{2*size + 1, 2*size + 2},     // one in the middle
			{size + 1, 2*size - 1},       // inside a page
			{0, size},                    // a page
			{size, 2 * size},             // another
			{size / 2, 3*size + size/2},  // both ends partial
			{size / 2, size + size/2},    // no page whole
			{size, 4*size + 1},           // a partial end
			{2*size - 1, 4 * size},       // a partial beginning
			{0, n * size},                // all
			{n*size - 1, n * size},       // the very last
			{1, n*size - 1},              // all but the outermost
			{(n - 1) * size, n*size - 1}, // the last page but its last token
		} {
			if x.whole && (tokens[0]%size != 0 || tokens[1]%size != 0) {
				continue
			}
			s := r.publish(n, true, lease)
			err := r.retrieve(tokens[0], tokens[1], s)
			r.end(s)
			if err != nil {
				return fmt.Errorf("%s: tokens [%d, %d): %w", x.name, tokens[0], tokens[1], err)
			}
		}
	}
	return nil
}

// wholeOnly reads parts of pages that have none.
func wholeOnly(b *bench) error {
	for _, x := range shapes() {
		if !x.whole {
			continue
		}
		r := b.rig(x.local, x.far)
		s := r.publish(3, false, lease)
		err := r.refused(fault.Unsupported, 0, 2*r.cache.PageSize()+1, s.local, s.remote, s.d)
		r.end(s)
		if err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
	}
	return nil
}

func tenThousand(b *bench) error {
	const n = 10_000
	c := kv.Config{Layout: kv.NHD, DType: kv.FP8, Layers: 2, Pages: n + 3, PageSize: 2, KVHeads: 1, HeadDim: 4}
	r := b.rig(c.LayerMajor, pages(c, n+100).PageMajor)
	s := r.publish(n, true, lease)
	defer r.end(s)
	return r.retrieve(1, 2*n-1, s)
}

// concurrent has more reads at once than workers.
func concurrent(b *bench) error {
	r := b.plain()
	size := r.cache.PageSize()
	var runs []*run
	want := r.snapshot()
	for range 7 {
		s := r.publish(2, true, lease)
		r.expect(want, 1, 2*size, s)
		runs = append(runs, s)
	}
	outcomes := make([]error, len(runs))
	var readers sync.WaitGroup
	for i, s := range runs {
		readers.Go(func() { outcomes[i] = r.reader.Retrieve(r.Context(), 1, 2*size, s.local, s.remote, s.d) })
	}
	readers.Wait()
	for _, s := range runs {
		r.end(s)
	}
	return errors.Join(errors.Join(outcomes...), r.compare(want))
}

// oneAfterTheOther reads what was published anew, by words that were used before.
func oneAfterTheOther(b *bench) error {
	r := b.plain()
	old := r.publish(1, false, lease)
	r.end(old)
	for range 20 {
		s := r.publish(3, true, lease)
		err := r.retrieve(3, 3*r.cache.PageSize(), s)
		r.end(s)
		if err != nil {
			return err
		}
	}
	s := r.publish(1, false, lease)
	defer r.end(s)
	if err := r.reader.Retrieve(r.Context(), 0, 1, s.local, old.remote, old.d); !errors.Is(err, fault.NotFound) {
		return fmt.Errorf("a publication long ended: error %w, want kind not found", orNone(err))
	}
	return nil
}

// checksums flips one bit of a whole page after it has arrived.
func checksums(b *bench) error {
	r := b.plain()
	if r.ground.mirror != nil {
		b.Skip("the host doesn't see the pages, which have no checksums")
	}
	size := r.cache.PageSize()
	flip := func(id page.ID) func(context.Context) {
		return func(context.Context) { must(r.cache.Plane(1, 1, id))(r)[5] ^= 4 }
	}
	s := r.publish(3, true, lease)
	defer r.end(s)
	r.engine.after = flip(s.local[1])
	if err := r.reader.Retrieve(r.Context(), 1, 3*size, s.local, s.remote, s.d); !errors.Is(err, fault.Corrupt) {
		return fmt.Errorf("a flipped bit: error %w, want kind corrupt", orNone(err))
	}
	r.engine.after = nil
	if err := r.retrieve(1, 3*size, s); err != nil {
		return fmt.Errorf("tried again: %w", err)
	}
	if want := (transfer.Stats{Reads: 2, Failures: 1, Pages: 3, Checked: 2}); r.reader.Stats() != want {
		return fmt.Errorf("the reader counts %+v, want %+v", r.reader.Stats(), want)
	}
	return nil
}
