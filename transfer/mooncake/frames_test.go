package mooncake

import (
	"bytes"
	"errors"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
)

// unexported lets frames be compared.
var unexported = cmp.AllowUnexported(frame{}, config{}, piece{}, request{}, word{})

// samples have something in every field of their type.
func samples() []frame {
	return []frame{
		{kind: startCall, call: 1, config: config{
			libraries: []string{"a.so", "/b/libtransfer_engine.so"}, metadata: peerToPeer, name: "127.0.0.1:12345",
			protocol: "tcp", maxStuck: 3, listen: netip.MustParseAddr("fd00::1"),
		}},
		{kind: startCall, config: config{metadata: "http://a/b"}},
		{kind: mapCall, call: 2, number: 7, write: true, bytes: 8192, pieces: []piece{{0, 0, 4096}, {4096, 1 << 40, 4096}}},
		{kind: mapCall, call: 2, number: 7, remote: true, bytes: 1},
		{kind: unmapCall, call: 3, number: math.MaxUint32},
		{kind: openCall, call: 4, text: "127.0.0.1:15001"},
		{kind: readCall, call: 5, number: 1, requests: []request{{1, 2, 3, math.MaxUint64}, {region: 9, bytes: sliceBytes}}},
		{kind: wordsCall, call: math.MaxUint64, number: 1, words: []word{{1 << 60, 8}, {5, wordMost}}},
		{kind: stopCall, call: 6},
		{kind: answerGood, call: 7, data: []byte{1, 2, 3}},
		{kind: answerBad, call: 8, fault: &fault.Error{Kind: fault.Busy, Object: "o", Detail: "d", Remedy: "r"}},
	}
}

func TestFrame_ComesBackAsItWas(t *testing.T) {
	for _, f := range samples() {
		var got frame
		if err := got.parse(f.append(nil)); err != nil {
			t.Errorf("type %d: %v", f.kind, err)
			continue
		}
		for _, x := range []*frame{&f, &got} { // empty lists are as good as none
			x.requests, x.words, x.data = slices.Clip(x.requests), slices.Clip(x.words), slices.Clip(x.data)
		}
		same := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
		if d := cmp.Diff(f, got, unexported, same); d != "" {
			t.Errorf("type %d (-want +got):\n%s", f.kind, d)
		}
	}
}

func TestFrame_RefusesWhatIsNone(t *testing.T) {
	for _, f := range samples() {
		whole := f.append(nil)
		for i := range whole[:frameHeader] {
			if i >= 8 {
				break // the number of a call can be any
			}
			bad := bytes.Clone(whole)
			bad[i] ^= 0x80
			if err := new(frame).parse(bad); fault.KindOf(err) == 0 {
				t.Errorf("type %d, byte %d changed: error %v, want one with a kind", f.kind, i, err)
			}
		}
		if f.kind == answerGood || f.kind == readCall || f.kind == wordsCall {
			continue // cut anywhere, or between two entries, they are shorter ones
		}
		for i := range whole {
			if err := new(frame).parse(whole[:i]); !errors.Is(err, fault.Invalid) {
				t.Errorf("type %d cut to %d bytes of %d: error %v, want kind invalid", f.kind, i, len(whole), err)
			}
		}
		if err := new(frame).parse(append(whole, 0)); !errors.Is(err, fault.Invalid) {
			t.Errorf("type %d and a byte: error %v, want kind invalid", f.kind, err)
		}
	}
	for name, f := range map[string]frame{
		"too many libraries": {kind: startCall, config: config{libraries: make([]string, maxLibraries+1)}},
		"too many pieces":    {kind: mapCall, pieces: make([]piece, maxPieces+1)},
		"negative bytes":     {kind: mapCall, bytes: -1},
		"too many requests":  {kind: readCall, requests: make([]request, frameRequests+1)},
		"too many words":     {kind: wordsCall, words: slices.Repeat([]word{{bytes: 8}}, wordsMost+1)},
		"a word of nothing":  {kind: wordsCall, words: []word{{}}},
		"a word too long":    {kind: wordsCall, words: []word{{bytes: wordMost + 1}}},
		"no kind of error":   {kind: answerBad, fault: &fault.Error{}},
		"an unknown type":    {kind: answerBad + 1},
		"too long":           {kind: answerGood, data: make([]byte, frameMost)},
	} {
		if err := new(frame).parse(f.append(nil)); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
}

func TestFrame_CutsLongTexts(t *testing.T) {
	f := frame{kind: answerBad, fault: &fault.Error{Kind: fault.Device, Detail: strings.Repeat("x", 3*maxText)}}
	var got frame
	if err := got.parse(f.append(nil)); err != nil || len(got.fault.Detail) != maxText {
		t.Errorf("error %v, %d bytes", err, len(got.fault.Detail))
	}
}

// The largest frames that are sent fit.
func TestFrame_LimitsFitAPacket(t *testing.T) {
	for _, f := range []frame{
		{kind: mapCall, pieces: make([]piece, maxPieces)},
		{kind: readCall, requests: make([]request, frameRequests)},
		{kind: wordsCall, words: make([]word, wordsMost)},
	} {
		if n := len(f.append(nil)); n > frameMost {
			t.Errorf("type %d has %d bytes, a packet %d", f.kind, n, frameMost)
		}
	}
}

func FuzzFrame(f *testing.F) {
	for _, s := range samples() {
		f.Add(s.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var got frame
		if err := got.parse(b); err != nil {
			if fault.KindOf(err) == 0 {
				t.Errorf("%v has no kind", err)
			}
			return
		}
		if again := got.append(nil); !bytes.Equal(again, b) {
			t.Errorf("%x comes back as %x", b, again)
		}
	})
}
