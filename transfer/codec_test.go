package transfer

import (
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

var update = flag.Bool("update", false, "write testdata/descriptor.hex anew")

// sample has something in every field.
func sample(t testing.TB) *Descriptor {
	t.Helper()
	c := shape
	c.Sink, c.FirstLayer, c.FirstHead, c.Scale, c.ScaleBytes = true, 5, 2, kv.PerToken, 4
	return &Descriptor{
		Owner:  OwnerID{0: 0xa0, 15: 0xaf},
		Entity: "prefill-0", Session: "host:1234",
		Epoch: Epoch{Word: 7, Count: 1 << 40}, Leases: true, Expires: time.Unix(0, 1_700_000_000_123_456_789),
		Geometry: must(c.PerLayerKVFirst())(t),
		Pages:    []page.ID{1, 4, 11}, Sums: []Sum{{1, 2}, {3, 4}, {1 << 63, ^uint64(0)}},
		Offers: []Offer{{Engine: "local", Data: []byte{1, 2, 3}}, {Engine: "tcp", Data: []byte{}}},
	}
}

func diff(a, b *Descriptor) string {
	return cmp.Diff(a, b, cmpopts.IgnoreUnexported(Descriptor{}),
		cmp.Comparer(func(x, y *kv.Geometry) bool { return x.Fingerprint() == y.Fingerprint() }))
}

// The encoding is a promise to other versions: it changes with codecVersion only.
func TestCodec_Golden(t *testing.T) {
	const name = "testdata/descriptor.hex"
	got := must(sample(t).AppendBinary(nil))(t)
	if *update {
		var lines strings.Builder
		for chunk := range slices.Chunk(got, 32) {
			lines.WriteString(hex.EncodeToString(chunk) + "\n")
		}
		noError(t, os.WriteFile(name, []byte(lines.String()), 0o644))
	}
	text := must(os.ReadFile(name))(t)
	want := must(hex.DecodeString(strings.ReplaceAll(string(text), "\n", "")))(t)
	if !slices.Equal(got, want) {
		t.Errorf("the encoding has changed: raise codecVersion, then go test ./transfer -run Golden -update\n got %x\nwant %x", got, want)
	}
	d := must(Decode(want))(t)
	if s := diff(sample(t), d); s != "" {
		t.Errorf("decoded (-want +got):\n%s", s)
	}
}

func TestCodec_RoundTrip(t *testing.T) {
	least := &Descriptor{Geometry: must(kv.Config{Pages: 1, PageSize: 1}.LayerMajor())(t)}
	whole := &Descriptor{
		Geometry: must(kv.OpaqueSpec{Layers: 2, Blocks: 4, PageSize: 8, BlockBytes: 10, LayerStride: 40, BlockStride: 10, RegionBytes: 80}.Geometry())(t),
		Pages:    []page.ID{0}, Epoch: Epoch{Word: ^uint32(0), Count: ^uint64(0)}, Expires: time.Unix(0, -1),
	}
	for _, d := range []*Descriptor{least, whole, sample(t)} {
		b := must(d.AppendBinary([]byte("before")))(t)
		got, err := Decode(b[len("before"):])
		if err != nil {
			t.Fatal(err)
		}
		if s := diff(d, got); s != "" {
			t.Errorf("(-want +got):\n%s", s)
		}
	}
}

func TestCodec_RefusesToEncodeWhatIsOutOfLimits(t *testing.T) {
	long := strings.Repeat("x", MaxNameBytes+1)
	for name, change := range map[string]func(d *Descriptor){
		"geometry":  func(d *Descriptor) { d.Geometry = nil },
		"entity":    func(d *Descriptor) { d.Entity = long },
		"session":   func(d *Descriptor) { d.Session = long },
		"apart":     func(d *Descriptor) { d.Pages = []page.ID{4, 1, 4} },
		"twice":     func(d *Descriptor) { d.Pages = []page.ID{1, 1, 11} },
		"below":     func(d *Descriptor) { d.Pages = []page.ID{-1, 1, 11} },
		"sink":      func(d *Descriptor) { d.Pages = []page.ID{0, 1, 11} },
		"above":     func(d *Descriptor) { d.Pages = []page.ID{1, 4, 12} },
		"sums":      func(d *Descriptor) { d.Sums = d.Sums[:2] },
		"offers":    func(d *Descriptor) { d.Offers = make([]Offer, MaxOffers+1) },
		"no name":   func(d *Descriptor) { d.Offers[0].Engine = "" },
		"long name": func(d *Descriptor) { d.Offers[0].Engine = long },
		"same name": func(d *Descriptor) { d.Offers[0].Engine = "tcp" },
		"offer":     func(d *Descriptor) { d.Offers[0].Data = make([]byte, MaxOfferBytes+1) },
	} {
		d := sample(t)
		change(d)
		if b, err := d.AppendBinary([]byte("x")); fault.KindOf(err) != fault.Invalid || string(b) != "x" {
			t.Errorf("%s: %d bytes, error %v, want kind invalid", name, len(b), err)
		}
	}
}

// resum makes the header of b fit its body, as somebody who means harm would.
func resum(b []byte) []byte {
	if len(b) >= headerBytes {
		put32(b[8:], uint32(len(b)-headerBytes))
		put32(b[12:], checksum(b))
	}
	return b
}

func put32(b []byte, n uint32) {
	b[0], b[1], b[2], b[3] = byte(n), byte(n>>8), byte(n>>16), byte(n>>24)
}

// Each byte of a good descriptor becomes hostile, with a sum that is right again.
func TestDecode_HostileBytes(t *testing.T) {
	good := must(sample(t).AppendBinary(nil))(t)
	for i := range good {
		for _, x := range []byte{0x00, 0x01, 0x7f, 0x80, 0xff} {
			b := slices.Clone(good)
			b[i] = x
			checkDecode(t, resum(b))
		}
		if _, err := Decode(resum(slices.Clone(good[:i]))); !errors.Is(err, fault.Invalid) {
			t.Errorf("cut to %d bytes, with a right sum: error %v, want kind invalid", i, err)
		}
	}
}

// checkDecode wants an error with a kind, or a descriptor that encodes to the same bytes.
func checkDecode(t *testing.T, b []byte) {
	t.Helper()
	d, err := Decode(b)
	if err != nil {
		if k := fault.KindOf(err); k != fault.Invalid && k != fault.Corrupt && k != fault.Unsupported {
			t.Fatalf("%v is of kind %v", err, k)
		}
		return
	}
	again, err := d.AppendBinary(nil)
	if err != nil || !slices.Equal(again, b) {
		t.Fatalf("decodes, and encodes to other bytes, error %v\n got %x\nfrom %x", err, again, b)
	}
}

func TestDecode_SaysWhatIsWrong(t *testing.T) {
	good := must(sample(t).AppendBinary(nil))(t)
	with := func(at int, x ...byte) []byte {
		b := slices.Clone(good)
		copy(b[at:], x)
		return b
	}
	for _, test := range []struct {
		b    []byte
		kind fault.Kind
		says string
	}{
		{nil, fault.Invalid, "truncated: 0 bytes"},
		{good[:15], fault.Invalid, "truncated: 15 bytes"},
		{good[:40], fault.Invalid, "truncated: 24 bytes of a body"},
		{append(slices.Clone(good), 1, 2), fault.Invalid, "2 trailing bytes"},
		{resum(append(slices.Clone(good), 1, 2)), fault.Invalid, "2 trailing bytes"},
		{with(0, 'X'), fault.Invalid, "begins with"},
		{with(4, 2), fault.Unsupported, "version 2"},
		{resum(with(7, 0x80)), fault.Invalid, "flags 0x8000"},
		{with(20, 0xff), fault.Corrupt, "CRC-32C"},
		{with(8, 0xff, 0xff, 0xff, 0xff), fault.Invalid, "of a body of 4294967295"},
		{make([]byte, MaxDescriptorBytes+1), fault.Invalid, "more than"},
	} {
		if _, err := Decode(test.b); fault.KindOf(err) != test.kind || !strings.Contains(err.Error(), test.says) {
			t.Errorf("error %v, want kind %v and %q", err, test.kind, test.says)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(must(sample(f).AppendBinary(nil))(f))
	least := &Descriptor{Geometry: must(kv.Config{Pages: 1, PageSize: 1}.LayerMajor())(f)}
	f.Add(must(least.AppendBinary(nil))(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		checkDecode(t, b)
		checkDecode(t, resum(slices.Clone(b)))
	})
}

// A descriptor keeps the order of a sequence, and finds each page of it in any order.
func TestDescriptor_KeepsTheOrderOfItsPages(t *testing.T) {
	geometry := must(shape.LayerMajor())(t)
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.SliceOfNDistinct(rapid.Int32Range(1, 11), 1, 11, rapid.ID[int32]).Draw(t, "pages")
		d := &Descriptor{Geometry: geometry}
		for _, id := range pages {
			d.Pages = append(d.Pages, page.ID(id))
		}
		b, err := d.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		if d, err = Decode(b); err != nil {
			t.Fatal(err)
		}
		for id := range page.ID(12) {
			after := rapid.IntRange(-1, len(pages)).Draw(t, "found before")
			at, ok := d.published(id, after)
			if want := slices.Index(pages, int32(id)); ok != (want >= 0) || ok && at != want {
				t.Errorf("page %d is at %d, %t, want %d", id, at, ok, want)
			}
		}
		d.Pages = append(d.Pages, d.Pages[0])
		if _, err := d.AppendBinary(nil); !errors.Is(err, fault.Invalid) {
			t.Errorf("a page twice: %v, want kind invalid", err)
		}
	})
}
