package mooncake

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

func sampleOffer() *Offer {
	return &Offer{
		Owner: transfer.OwnerID{1, 15: 2}, Fingerprint: kv.Fingerprint{3, 15: 4}, Segment: "127.0.0.1:15001",
		Header: 0x7f0000001000, Words: Stretch{0x7f0000002000, 4096},
		Regions: []Stretch{{0x7f0000003000, 1 << 30}, {0x7f1000000000, 0}},
	}
}

func encoded(t testing.TB, o *Offer) []byte {
	t.Helper()
	b, err := o.AppendBinary(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestOffer_ComesBackAsItWas(t *testing.T) {
	want := sampleOffer()
	got, err := ParseOffer(encoded(t, want))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestOffer_RefusesWhatIsNone(t *testing.T) {
	whole := encoded(t, sampleOffer())
	for i := range whole {
		bad := bytes.Clone(whole)
		bad[i] ^= 0x10
		if _, err := ParseOffer(bad); fault.KindOf(err) == 0 {
			t.Errorf("byte %d changed: error %v, want one with a kind", i, err)
		}
		if _, err := ParseOffer(whole[:i]); !errors.Is(err, fault.Invalid) {
			t.Errorf("cut to %d bytes: error %v, want kind invalid", i, err)
		}
	}
	if _, err := ParseOffer(append(whole, 0)); !errors.Is(err, fault.Invalid) {
		t.Errorf("a byte behind it: error %v, want kind invalid", err)
	}
	for name, edit := range map[string]func(*Offer){
		"a region that wraps around": func(o *Offer) { o.Regions[0] = Stretch{math.MaxUint64 - 5, 10} },
		"a region beyond all memory": func(o *Offer) { o.Regions[0].Bytes = maxRegionBytes + 1 },
		"words of negative length":   func(o *Offer) { o.Words.Bytes = -1 },
		"a header at the end":        func(o *Offer) { o.Header = math.MaxInt64 - 3 },
	} {
		o := sampleOffer()
		edit(o)
		if _, err := ParseOffer(encoded(t, o)); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
	for name, edit := range map[string]func(*Offer){
		"no name":          func(o *Offer) { o.Segment = "" },
		"a long name":      func(o *Offer) { o.Segment = strings.Repeat("a", maxName+1) },
		"too many regions": func(o *Offer) { o.Regions = make([]Stretch, maxRegions+1) },
	} {
		o := sampleOffer()
		edit(o)
		if _, err := o.AppendBinary(nil); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
	most := sampleOffer()
	most.Segment, most.Regions = strings.Repeat("a", maxName), make([]Stretch, maxRegions)
	if n := len(encoded(t, most)); n > transfer.MaxOfferBytes {
		t.Errorf("the longest has %d bytes", n)
	}
}

func TestOffer_MustBeTheDescriptors(t *testing.T) {
	c := kv.Config{Layout: kv.NHD, DType: kv.BF16, Layers: 2, Pages: 8, PageSize: 4, KVHeads: 1, HeadDim: 8}
	g, err := c.PerLayerPageFirst()
	if err != nil {
		t.Fatal(err)
	}
	d := &transfer.Descriptor{Owner: transfer.OwnerID{9}, Geometry: g}
	good := func() *Offer {
		o := &Offer{Owner: d.Owner, Fingerprint: g.Fingerprint(), Segment: "a:1"}
		for _, n := range g.Spec().RegionBytes {
			o.Regions = append(o.Regions, Stretch{4096, n})
		}
		return o
	}
	if err := good().check(d); err != nil {
		t.Error(err)
	}
	for name, edit := range map[string]func(*Offer){
		"owner":             func(o *Offer) { o.Owner[0]++ },
		"geometry":          func(o *Offer) { o.Fingerprint[0]++ },
		"number of regions": func(o *Offer) { o.Regions = slices.Delete(o.Regions, 0, 1) },
		"size of a region":  func(o *Offer) { o.Regions[1].Bytes-- },
	} {
		o := good()
		edit(o)
		if err := o.check(d); !errors.Is(err, fault.Invalid) {
			t.Errorf("another %s: error %v, want kind invalid", name, err)
		}
	}
}

func FuzzOffer(f *testing.F) {
	f.Add(encoded(f, sampleOffer()))
	f.Add([]byte(offerMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := ParseOffer(b)
		if err != nil {
			if fault.KindOf(err) == 0 {
				t.Errorf("%v has no kind", err)
			}
			return
		}
		if again := encoded(t, o); !bytes.Equal(again, b) {
			t.Errorf("%x comes back as %x", b, again)
		}
	})
}
