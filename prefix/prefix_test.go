package prefix

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// hexBytes is bytes written in hex.
type hexBytes []byte

func (h *hexBytes) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

// vector is one line of testdata/golden.json, which golden.py makes.
type vector struct {
	Func   string
	Key    hexBytes
	Keys   []hexBytes
	Prev   hexBytes
	Fields []hexBytes
	Tokens []uint32
	Items  []struct {
		Start, Offset, Length uint32
		Digest                hexBytes
	}
	ID        string
	Part      uint32
	PageSize  int `json:"page_size"`
	Namespace struct {
		Tenant, Model, DType, Layout, Scheme, Salt string
		Digest, Scales                             hexBytes
		Adapters                                   []string
		PageSize                                   int `json:"page_size"`
		Layers                                     int
	}
}

func TestKeys_AreThoseAnotherProgramMakes(t *testing.T) {
	text, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []vector
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for i, v := range vectors {
		seen[v.Func] = true
		t.Run(fmt.Sprintf("%d %s", i, v.Func), func(t *testing.T) {
			want := v.Keys
			if want == nil {
				want = []hexBytes{v.Key}
			}
			var hexes []string
			for _, k := range goldenKeys(t, v) {
				hexes = append(hexes, hex.EncodeToString(k[:]))
			}
			var wantHexes []string
			for _, k := range want {
				wantHexes = append(wantHexes, hex.EncodeToString(k))
			}
			if d := cmp.Diff(wantHexes, hexes); d != "" {
				t.Errorf("keys (-want +got):\n%s", d)
			}
		})
	}
	if len(seen) != 6 {
		t.Errorf("vectors of %d functions, want 6: %v", len(seen), seen)
	}
}

func goldenKeys(t *testing.T, v vector) []page.Key {
	var prev page.Key
	copy(prev[:], v.Prev)
	id := uint64(0)
	if v.ID != "" {
		var err error
		if id, err = strconv.ParseUint(v.ID, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	switch v.Func {
	case "Fingerprint":
		var fields [][]byte
		for _, f := range v.Fields {
			fields = append(fields, f)
		}
		return []page.Key{Fingerprint(fields...)}
	case "Next":
		var items []Item
		for _, it := range v.Items {
			items = append(items, Item{it.Start, it.Offset, it.Length, it.Digest})
		}
		return []page.Key{Next(prev, v.Tokens, items)}
	case "NextID":
		return []page.Key{NextID(prev, id)}
	case "NextIDPart":
		return []page.Key{NextIDPart(prev, id, v.Part)}
	case "AppendChain":
		return AppendChain(nil, prev, v.Tokens, v.PageSize)
	case "Root":
		n := v.Namespace
		return []page.Key{Namespace{
			Tenant: n.Tenant, Model: n.Model, Digest: n.Digest, Adapters: n.Adapters, DType: n.DType, Scales: n.Scales,
			PageSize: n.PageSize, Layers: n.Layers, Layout: n.Layout, HashScheme: n.Scheme, Salt: n.Salt,
		}.Root()}
	}
	t.Fatalf("unknown function %q", v.Func)
	return nil
}

// content is what the key of a page covers.
type content struct {
	Prev   page.Key
	Tokens []uint32
	Items  []Item
}

// readPage reads back what appendPage wrote; false when that is not possible.
func readPage(b []byte) (c content, ok bool) {
	defer func() {
		if recover() != nil { // read past the end
			ok = false
		}
	}()
	field := func(b *[]byte) []byte {
		n := binary.LittleEndian.Uint32(*b)
		f := (*b)[4 : 4+n]
		*b = (*b)[4+n:]
		return f
	}
	number := func(b *[]byte) uint32 {
		n := binary.LittleEndian.Uint32(*b)
		*b = (*b)[4:]
		return n
	}
	if copy(c.Prev[:], field(&b)) != len(c.Prev) {
		return c, false
	}
	for tokens := field(&b); len(tokens) > 0; {
		c.Tokens = append(c.Tokens, number(&tokens))
	}
	for items := field(&b); len(items) > 0; {
		it := Item{Start: number(&items), Offset: number(&items), Length: number(&items)}
		it.Digest = field(&items)
		c.Items = append(c.Items, it)
	}
	return c, len(b) == 0
}

func genContent(t *rapid.T, name string) (c content) {
	// Few values, among them those that look like lengths, so that what differs
	// in one place only, or is split in another, is common.
	number := rapid.SampledFrom([]uint32{0, 1, 2, 4, 8, 12, 16, 32})
	c.Prev[0] = byte(rapid.IntRange(0, 1).Draw(t, name+" prev"))
	c.Tokens = rapid.SliceOfN(number, 0, 6).Draw(t, name+" tokens")
	for range rapid.IntRange(0, 3).Draw(t, name+" items") {
		it := Item{Start: number.Draw(t, "start"), Offset: number.Draw(t, "offset"), Length: number.Draw(t, "length")}
		for range rapid.IntRange(0, 4).Draw(t, "numbers in digest") {
			it.Digest = binary.LittleEndian.AppendUint32(it.Digest, number.Draw(t, "digest"))
		}
		c.Items = append(c.Items, it)
	}
	return c
}

func (c content) equal(d content) bool {
	return c.Prev == d.Prev && slices.Equal(c.Tokens, d.Tokens) && slices.EqualFunc(c.Items, d.Items, func(a, b Item) bool {
		return a.Start == b.Start && a.Offset == b.Offset && a.Length == b.Length && bytes.Equal(a.Digest, b.Digest)
	})
}

// What can be read back in one way only cannot be the encoding of two contents.
func TestNext_EncodingCanBeReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := genContent(t, "a")
		got, ok := readPage(appendPage(nil, c.Prev, c.Tokens, c.Items))
		if !ok || !got.equal(c) {
			t.Fatalf("wrote %v, read %v, %t", c, got, ok)
		}
	})
}

func TestNext_KeysAreEqualOnlyForEqualContents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := genContent(t, "a"), genContent(t, "b")
		if rapid.Bool().Draw(t, "same tokens") {
			b.Prev, b.Tokens = a.Prev, a.Tokens
		}
		keys := Next(a.Prev, a.Tokens, a.Items) == Next(b.Prev, b.Tokens, b.Items)
		if keys != a.equal(b) {
			t.Fatalf("%v and %v: equal keys %t", a, b, keys)
		}
	})
}

func TestNext_EveryPartOfAPageIsInItsKey(t *testing.T) {
	item := Item{Start: 1, Offset: 2, Length: 3, Digest: []byte("image")}
	base := content{Tokens: []uint32{10, 11}, Items: []Item{item, {Start: 5}}}
	change := map[string]func(c *content){
		"prev":           func(c *content) { c.Prev[31] = 1 },
		"token":          func(c *content) { c.Tokens[1]++ },
		"order":          func(c *content) { slices.Reverse(c.Tokens) },
		"one token more": func(c *content) { c.Tokens = append(c.Tokens, 0) },
		"one token less": func(c *content) { c.Tokens = c.Tokens[:1] },
		"start":          func(c *content) { c.Items[0].Start++ },
		"offset":         func(c *content) { c.Items[0].Offset++ },
		"length":         func(c *content) { c.Items[0].Length++ },
		"digest":         func(c *content) { c.Items[0].Digest = []byte("imagf") },
		"digest longer":  func(c *content) { c.Items[0].Digest = []byte("image\x00") },
		"one item less":  func(c *content) { c.Items = c.Items[:1] },
		"order of items": func(c *content) { slices.Reverse(c.Items) },
	}
	seen := map[page.Key]string{Next(base.Prev, base.Tokens, base.Items): "base"}
	for name, f := range change {
		c := content{base.Prev, slices.Clone(base.Tokens), slices.Clone(base.Items)}
		f(&c)
		k := Next(c.Prev, c.Tokens, c.Items)
		if other, taken := seen[k]; taken {
			t.Errorf("%s and %s have one key", name, other)
		}
		seen[k] = name
	}
}

func TestFingerprint_FieldsDoNotRunIntoEachOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gen := rapid.SliceOfN(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 4}), 0, 6), 0, 4)
		a, b := gen.Draw(t, "a"), gen.Draw(t, "b")
		if keys := Fingerprint(a...) == Fingerprint(b...); keys != slices.EqualFunc(a, b, bytes.Equal) {
			t.Fatalf("%v and %v: equal keys %t", a, b, keys)
		}
	})
}

func TestAppendChain_KeysWholePagesOnly(t *testing.T) {
	root := Fingerprint([]byte("root"))
	tokens := make([]uint32, 100)
	for i := range tokens {
		tokens[i] = uint32(i * i)
	}
	before := []page.Key{{1}}
	for _, size := range []int{-1, 0, 1, 7, 32, 50, 99, 100, 101, 1 << 40} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			want, prev := slices.Clone(before), root
			if size > 0 {
				for i := range len(tokens) / size {
					prev = Next(prev, tokens[i*size:(i+1)*size], nil)
					want = append(want, prev)
				}
			}
			if d := cmp.Diff(want, AppendChain(before, root, tokens, size)); d != "" {
				t.Errorf("keys (-want +got):\n%s", d)
			}
		})
	}
}

func TestAppendChain_KeysDependOnAllThatCameBefore(t *testing.T) {
	tokens := make([]uint32, 64)
	keys := AppendChain(nil, page.Key{}, tokens, 16)
	tokens[20]++
	other := AppendChain(nil, page.Key{}, tokens, 16)
	for i := range keys {
		if same := keys[i] == other[i]; same != (i < 1) {
			t.Errorf("page %d: same key %t", i, same)
		}
	}
	if rooted := AppendChain(nil, page.Key{1}, tokens, 16); slices.ContainsFunc(rooted, func(k page.Key) bool { return slices.Contains(other, k) }) {
		t.Error("two roots share a key")
	}
}

func TestNextID_PartsAndIDsHaveKeysOfTheirOwn(t *testing.T) {
	seen := map[page.Key]string{}
	add := func(name string, k page.Key) {
		if other, taken := seen[k]; taken {
			t.Errorf("%s and %s have one key", name, other)
		}
		seen[k] = name
	}
	for prev := range byte(2) {
		for _, id := range []uint64{0, 1, 1 << 32, 1 << 63} {
			add(fmt.Sprintf("%d/%d", prev, id), NextID(page.Key{prev}, id))
			for _, part := range []uint32{0, 1, 1 << 31} {
				add(fmt.Sprintf("%d/%d part %d", prev, id, part), NextIDPart(page.Key{prev}, id, part))
			}
			add(fmt.Sprintf("%d/%d as tokens", prev, id), Next(page.Key{prev}, []uint32{uint32(id), uint32(id >> 32)}, nil))
		}
	}
}

// One block of SHA-256 is 64 bytes, of which the padding takes at least 9.
func TestNextID_HashesOneBlock(t *testing.T) {
	const prev = len(page.Key{})
	for _, id := range []int{8, 8 + 4} {
		if n := lenSize + prev + lenSize + id; n > 64-9 {
			t.Errorf("%d bytes are more than one block", n)
		}
	}
}

func TestGiven_TakesKeysAsTheyAre(t *testing.T) {
	long := bytes.Repeat([]byte{0xab}, 33)
	for n := range 34 {
		k, err := Given(long[:n])
		if n < 8 || n > 32 {
			if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), fmt.Sprint(n)) || fault.RemedyOf(err) == "" {
				t.Errorf("%d bytes: got error %v", n, err)
			}
			continue
		}
		var want page.Key
		copy(want[:], long[:n])
		if n < 32 {
			want[31] = byte(n)
		}
		if err != nil || k != want {
			t.Errorf("%d bytes: got %x, %v, want %x", n, k[:], err, want[:])
		}
	}
}

func TestGiven_ShortKeysAreNotConfused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		gen := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 8, 9, 10}), 8, 11)
		a, b := gen.Draw(t, "a"), gen.Draw(t, "b")
		if rapid.Bool().Draw(t, "related") {
			b = append(slices.Clone(a), b[:rapid.IntRange(0, 2).Draw(t, "more")]...)
		}
		ka, _ := Given(a)
		kb, _ := Given(b)
		if (ka == kb) != bytes.Equal(a, b) {
			t.Fatalf("%x and %x: %v and %v", a, b, ka, kb)
		}
	})
}

func TestNamespace_EveryFieldChangesTheRoot(t *testing.T) {
	base := Namespace{
		Tenant: "t", Model: "m", Digest: []byte{1}, Adapters: []string{"x", "y"}, DType: "bf16", Scales: []byte{2},
		PageSize: 16, Layers: 4, Layout: "NHD", HashScheme: SchemeTokens, Salt: "s",
	}
	seen := map[page.Key]string{base.Root(): "base", Namespace{}.Root(): "zero"}
	add := func(name string, n Namespace) {
		k := n.Root()
		if other, taken := seen[k]; taken {
			t.Errorf("%s and %s have one root", name, other)
		}
		seen[k] = name
	}
	for i := range reflect.TypeFor[Namespace]().NumField() {
		n := base
		f := reflect.ValueOf(&n).Elem().Field(i)
		switch f.Kind() {
		case reflect.String:
			f.SetString(f.String() + "2")
		case reflect.Int:
			f.SetInt(f.Int() + 1)
		case reflect.Slice:
			f.Set(f.Slice(0, f.Len()-1))
		default:
			t.Fatalf("cannot change a %v", f.Kind())
		}
		add(reflect.TypeFor[Namespace]().Field(i).Name, n)
	}
	n := base
	n.Tenant, n.Model = "", "tm"
	add("name moved to the next field", n)
	n = base
	n.Adapters = []string{"xy"}
	add("adapters joined", n)
	n.Adapters = []string{"y", "x"}
	add("adapters in another order", n)
	n = base
	n.HashScheme = SchemeIDs
	add("scheme", n)
}

func TestKeys_DoNotAllocate(t *testing.T) {
	tokens := make([]uint32, 512)
	keys := make([]page.Key, 0, 8)
	items := []Item{{Digest: make([]byte, 32)}}
	for name, f := range map[string]func(){
		"NextID":      func() { keys = append(keys[:0], NextID(page.Key{}, 7)) },
		"NextIDPart":  func() { keys = append(keys[:0], NextIDPart(page.Key{}, 7, 1)) },
		"Next":        func() { keys = append(keys[:0], Next(page.Key{}, tokens, items)) },
		"AppendChain": func() { keys = AppendChain(keys[:0], page.Key{}, tokens, 64) },
		"Given":       func() { k, _ := Given(keys[0][:]); keys = append(keys[:0], k) },
	} {
		keys = keys[:1]
		if n := testing.AllocsPerRun(20, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkNextID(b *testing.B) {
	var k page.Key
	b.ReportAllocs()
	for i := uint64(0); b.Loop(); i++ {
		k = NextID(k, i)
	}
}

func BenchmarkNext(b *testing.B) {
	for _, n := range []int{16, 128, 512} {
		b.Run(fmt.Sprintf("tokens=%d", n), func(b *testing.B) {
			tokens := make([]uint32, n)
			var k page.Key
			b.ReportAllocs()
			for b.Loop() {
				k = Next(k, tokens, nil)
			}
		})
	}
}
