package hostipc

import (
	"bytes"
	"math"
	"testing"

	"github.com/kvferry/kvferry/fault"
)

func grants() []*grant {
	words := extent{base: 4096, bytes: 64, pieces: []piece{{0, 64}}}
	return []*grant{
		{words: words},
		{words: words, regions: []extent{{base: 1 << 20, bytes: 8192 + 100, pieces: []piece{{4096, 8192}, {0, 100}}}, {}}},
		{words: words, byProcess: true, regions: []extent{{base: math.MaxUint64 - 7, bytes: 7}}},
	}
}

func TestGrant_ComesBack(t *testing.T) {
	for _, g := range grants() {
		b := g.form()
		got, err := parseGrant(b)
		noError(t, err)
		if !bytes.Equal(got.form(), b) {
			t.Errorf("%+v came back as %+v", g, got)
		}
		for n := range b {
			if _, err := parseGrant(b[:n]); fault.KindOf(err) != fault.Invalid {
				t.Errorf("%d bytes of %d: %v, want kind invalid", n, len(b), err)
			}
		}
	}
}

func TestParseGrant_RefusesWhatCannotBe(t *testing.T) {
	for name, change := range map[string]func(g *grant){
		"no words":                      func(g *grant) { g.words = extent{} },
		"half a word":                   func(g *grant) { g.words.bytes, g.words.pieces[0].bytes = 60, 60 },
		"words in the process":          func(g *grant) { g.words.pieces = nil },
		"words without end":             func(g *grant) { g.words.bytes, g.words.pieces[0].bytes = maxWordBytes+8, maxWordBytes+8 },
		"bytes in no piece":             func(g *grant) { g.regions[0].bytes++ },
		"pieces beyond the end":         func(g *grant) { g.regions[0].bytes-- },
		"an empty piece":                func(g *grant) { g.regions[0].pieces[1].bytes = 0 },
		"a negative one":                func(g *grant) { g.regions[0].pieces[1].bytes = -1 },
		"a piece that ends in a page":   func(g *grant) { g.regions[0].pieces = []piece{{0, 100}, {0, 8192}} },
		"a file from inside of a page":  func(g *grant) { g.regions[0].pieces[0].off = 8 },
		"a file from its end of all":    func(g *grant) { g.regions[0].pieces[0].off = math.MaxInt64 &^ 4095 },
		"addresses beyond the last":     func(g *grant) { g.regions[0].base = math.MaxUint64 },
		"pieces, and read by process":   func(g *grant) { g.byProcess = true },
		"no pieces, and mapped":         func(g *grant) { g.regions[0].pieces = nil },
		"more bytes than have a number": func(g *grant) { g.regions[0].bytes = -1 },
	} {
		g := grants()[1]
		change(g)
		if _, err := parseGrant(g.form()); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: %v, want kind invalid", name, err)
		}
	}
	b := grants()[0].form()
	b[2] = 4
	_, err := parseGrant(b)
	wantKind(t, err, fault.Invalid, "flags 0x4")
}

func FuzzParseGrant(f *testing.F) {
	for _, g := range grants() {
		f.Add(g.form())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := parseGrant(b)
		if err != nil {
			if fault.KindOf(err) == 0 || g != nil {
				t.Errorf("%v and error %v without a kind", g, err)
			}
			return
		}
		if !bytes.Equal(g.form(), b) {
			t.Errorf("%x has another encoding: %+v", b, g)
		}
		for _, x := range append(g.regions, g.words) {
			var sum int64
			for _, p := range x.pieces {
				sum += p.bytes
			}
			if x.bytes < 0 || len(x.pieces) > 0 && sum != x.bytes || x.base+uint64(x.bytes) < x.base {
				t.Errorf("%+v is no memory", x)
			}
		}
	})
}

func FuzzParseOffer(f *testing.F) {
	f.Add(formOffer(name + "-00112233445566778899aabbccddeeff"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		socket, err := parseOffer(b)
		if err != nil {
			if fault.KindOf(err) == 0 || socket != "" {
				t.Errorf("%q and error %v without a kind", socket, err)
			}
			return
		}
		if !bytes.Equal(formOffer(socket), b) {
			t.Errorf("%x names %q", b, socket)
		}
	})
}
