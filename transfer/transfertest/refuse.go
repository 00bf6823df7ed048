package transfertest

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// The cases about what must never be read.

// refusals asks for what is out of range.
func refusals(b *bench) error {
	r := b.rig(mla.LayerMajor, pages(mla, 33).PageMajor)
	size, outside := r.cache.PageSize(), page.ID(r.cache.Geometry().Pages())
	s := r.publish(3, false, lease)
	defer r.end(s)
	with := func(list []page.ID, at int, id page.ID) []page.ID {
		list = slices.Clone(list)
		list[at] = id
		return list
	}
	var foreign page.ID = 1
	for slices.Contains(s.remote, foreign) {
		foreign++
	}
	for _, x := range []struct {
		name          string
		start, end    int
		local, remote []page.ID
		d             *transfer.Descriptor
	}{
		{"before the sequence", -1, 2, s.local, s.remote, s.d},
		{"too few local pages", 0, 3 * size, s.local[:2], s.remote, s.d},
		{"too few remote pages", 0, 2*size + 1, s.local, s.remote[:2], s.d},
		{"a local page twice", 0, 3 * size, with(s.local, 0, s.local[2]), s.remote, s.d},
		{"a local page twice, in part", 1, 3*size - 1, with(s.local, 0, s.local[2]), s.remote, s.d},
		{"a local page whole and in part", 1, 3 * size, with(s.local, 0, s.local[1]), s.remote, s.d},
		{"a local page out of range", 0, 3 * size, with(s.local, 1, outside), s.remote, s.d},
		{"a local page below 0", 0, 3 * size, with(s.local, 1, -1), s.remote, s.d},
		{"the local sink", 0, 3 * size, with(s.local, 1, page.Sink), s.remote, s.d},
		{"a page that is not published", 0, 3 * size, s.local, with(s.remote, 1, foreign), s.d},
		{"a part of one", 0, 2*size + 1, s.local, with(s.remote, 2, foreign), s.d},
		{"a remote page far out", 0, 3 * size, s.local, with(s.remote, 0, 1<<30), s.d},
		{"no descriptor", 0, size, s.local, s.remote, nil},
	} {
		if err := r.refused(fault.Invalid, x.start, x.end, x.local, x.remote, x.d); err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
	}
	return nil
}

// otherGeometry changes what must be equal.
func otherGeometry(b *bench) error {
	r := b.plain()
	s := r.publish(2, false, lease)
	defer r.end(s)
	heads, dtype, size, layers, ids := nhd, nhd, nhd, nhd, nhd
	heads.FirstHead, dtype.DType, size.PageSize, layers.Layers, ids.FirstLayer = 2, kv.FP16, 4, 2, 5
	for _, c := range []kv.Config{heads, dtype, size, layers, ids, pages(hnd, 19)} {
		d := *s.d
		d.Geometry = must(pages(c, 19).PageMajor())(r)
		if err := r.refused(fault.Invalid, 0, 3, s.local, s.remote, &d); err != nil {
			return err
		}
	}
	return nil
}

// lies has descriptors that say, of an owner that is there, what isn't so. None may be
// read by, and none may touch a byte or end the process.
func lies(b *bench) error {
	r := b.plain()
	s := r.publish(2, false, lease)
	defer r.end(s)
	offer := s.d.Offers[0]
	changed := func(name string, data []byte) *transfer.Descriptor {
		d := *s.d
		d.Offers = []transfer.Offer{{Engine: name, Data: data}}
		return &d
	}
	strides, pagesLie, owner, word, count := *s.d, *s.d, *s.d, *s.d, *s.d
	strides.Geometry = must(pages(nhd, 19).LayerMajor())(r)
	pagesLie.Geometry = must(pages(nhd, 20).PageMajor())(r)
	owner.Owner[3]++
	word.Epoch.Word = 1 << 31
	count.Epoch.Count++
	for name, d := range map[string]*transfer.Descriptor{
		"strides": &strides, "number of pages": &pagesLie, "owner": &owner, "word": &word, "count": &count,
		"no offer":    changed(offer.Engine, nil),
		"half offer":  changed(offer.Engine, offer.Data[:len(offer.Data)/2]),
		"long offer":  changed(offer.Engine, append(slices.Clone(offer.Data), 0)),
		"other offer": changed(offer.Engine, slices.Repeat([]byte{0xff}, len(offer.Data))),
		"huge offer":  changed(offer.Engine, make([]byte, transfer.MaxOfferBytes)),
		"engine":      changed("no such engine", offer.Data),
	} {
		want := r.snapshot()
		err := r.reader.Retrieve(r.Context(), 0, 3, s.local, s.remote, d)
		if err == nil || fault.KindOf(err) == 0 {
			return fmt.Errorf("%s: error %w, want one with a kind", name, orNone(err))
		}
		if err := r.compare(want); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := r.retrieve(0, 3, s); err != nil {
		return fmt.Errorf("the truth, after the lies: %w", err)
	}
	return nil
}

// brokenDescriptors flips each byte of a descriptor, and cuts it everywhere.
func brokenDescriptors(b *bench) error {
	r := b.plain()
	s := r.publish(2, true, lease)
	defer r.end(s)
	whole := must(s.d.AppendBinary(nil))(r)
	for i := range whole {
		bad := slices.Clone(whole)
		bad[i] ^= 0x10
		if _, err := transfer.Decode(bad); fault.KindOf(err) == 0 {
			return fmt.Errorf("byte %d of %d flipped: error %w, want one with a kind", i, len(whole), orNone(err))
		}
		if _, err := transfer.Decode(whole[:i]); !errors.Is(err, fault.Invalid) {
			return fmt.Errorf("cut to %d bytes of %d: error %w, want kind invalid", i, len(whole), orNone(err))
		}
	}
	if _, err := transfer.Decode(append(slices.Clone(whole), 0)); !errors.Is(err, fault.Invalid) {
		return fmt.Errorf("a byte behind it: error %w, want kind invalid", orNone(err))
	}
	return nil
}
