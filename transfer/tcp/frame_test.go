package tcp

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

var update = flag.Bool("update", false, "write testdata/frames.txt anew")

func sampleOrder() order {
	return order{sums: true, from: 1 << 40, to: 1<<40 + 5, runs: []run{{1, 2}, {1<<31 - 2, 1}}, parts: []part{{7, 0, 3}, {9, 5, 6}}}
}

// The frames are a promise to other hosts: they change with version only.
func TestFrames_Golden(t *testing.T) {
	const name = "testdata/frames.txt"
	h := hello{version: version, mode: modeTLS, role: rOwner, nonce: [nonceBytes]byte{0: 1, 31: 32}}
	var owner transfer.OwnerID
	var print kv.Fingerprint
	for i := range owner {
		owner[i], print[i] = 0xa0+byte(i), 0x50+byte(i)
	}
	o := sampleOrder()
	e := transfer.Epoch{Word: 7, Count: 1 << 33}
	var text strings.Builder
	for _, f := range []struct {
		name string
		b    []byte
	}{
		{"offer", newOffer("node7.example:7000", true)},
		{"hello", h.append(nil)},
		{"proof of the reader", prove(testKey(), readerLabel, &h, &h, []byte("binding"))},
		{"proof of the owner", prove(testKey(), ownerLabel, &h, &h, nil)},
		{"open", appendOpen(nil, owner, print)},
		{"word", appendWord(nil, 7)},
		{"copy", o.append(nil)},
		{"join", appendEpoch(nil, askJoin, e)},
		{"leave", appendEpoch(nil, askLeave, e)},
		{"reply done", put(reply{kind: sayDone})},
		{"reply value", put(reply{kind: sayValue, a: 1 << 40, b: 7})},
		{"reply data", put(reply{kind: sayData, flags: flagSums, body: segmentBytes, a: 1, b: 2})},
		{"reply failed", put(reply{kind: sayFailed, code: codeDenied})},
	} {
		fmt.Fprintf(&text, "%s: %s\n", f.name, hex.EncodeToString(f.b))
	}
	if *update {
		noError(t, os.MkdirAll("testdata", 0o755))
		noError(t, os.WriteFile(name, []byte(text.String()), 0o644))
	}
	want, err := os.ReadFile(name)
	noError(t, err)
	if s := cmp.Diff(string(want), text.String()); s != "" {
		t.Errorf("the frames have changed: raise version, then go test ./transfer/tcp -run Golden -update (-want +got):\n%s", s)
	}
}

func put(r reply) []byte {
	var b [replyBytes]byte
	r.put(&b)
	return b[:]
}

func TestOrder_RoundTrip(t *testing.T) {
	for _, o := range []order{{}, {to: 1}, sampleOrder()} {
		b := o.append(nil)
		h, err := decodeHead((*[headBytes]byte)(b))
		noError(t, err)
		got := sampleOrder() // what was there before is not there any more
		noError(t, got.decode(h.flags, b[headBytes:]))
		if !bytes.Equal(got.append(nil), b) {
			t.Errorf("%+v has become %+v", o, got)
		}
	}
}

func TestOrder_Refuses(t *testing.T) {
	for name, spoil := range map[string]func(o *order){
		"from beyond to":   func(o *order) { o.from = o.to + 1 },
		"negative":         func(o *order) { o.from = -1 },
		"a run of nothing": func(o *order) { o.runs[0].n = 0 },
		"a run too long":   func(o *order) { o.runs[0].n = maxRuns + 1 },
		"too many pages":   func(o *order) { o.runs[0].n, o.runs[1] = maxRuns, run{0, 1} },
		"ids that wrap":    func(o *order) { o.runs[1].n = 2 },
		"negative id":      func(o *order) { o.runs[0].first = -1 },
		"no tokens":        func(o *order) { o.parts[0].t1 = 0 },
		"tokens backwards": func(o *order) { o.parts[1].t0 = 6 },
		"many tokens":      func(o *order) { o.parts[0].t1 = kv.MaxPageSize + 1 },
		"three parts":      func(o *order) { o.parts = append(o.parts, o.parts[0]) },
	} {
		o := sampleOrder()
		spoil(&o)
		b := o.append(nil)
		if err := new(order).decode(flagSums, b[headBytes:]); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: error %v, want kind invalid", name, err)
		}
	}
	o := sampleOrder()
	b := o.append(nil)
	for n := headBytes + copyHead; n <= len(b)+1; n++ {
		if n == len(b) {
			continue
		}
		cut := append(bytes.Clone(b), 0)[:n]
		faulttest.Refused(t, new(order).decode(0, cut[headBytes:]), fault.Corrupt)
		resum(cut)
		faulttest.Refused(t, new(order).decode(0, cut[headBytes:]), fault.Invalid)
	}
}

func TestDecodeHead_Refuses(t *testing.T) {
	for name, b := range map[string][headBytes]byte{
		"zero":            {},
		"unknown":         {99},
		"a byte behind":   {askWord, 0, 1},
		"flags":           {askWord, 1, 0, 0, 4},
		"unknown flags":   {askCopy, 2, 0, 0, copyHead},
		"short":           {askWord, 0, 0, 0, 3},
		"long":            {askJoin, 0, 0, 0, 13},
		"hostile length":  {askCopy, 0, 0, 0, 0xff, 0xff, 0xff, 0xff},
		"negative length": {askOpen, 0, 0, 0, 0, 0, 0, 0x80},
	} {
		if h, err := decodeHead(&b); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: %+v, error %v, want kind invalid", name, h, err)
		}
	}
}

func TestDecodeReply_Refuses(t *testing.T) {
	for name, c := range map[string]struct {
		r    reply
		want byte
		kind fault.Kind
	}{
		"another kind":     {reply{kind: sayDone}, sayValue, fault.Invalid},
		"gone":             {reply{kind: sayFailed, code: codeGone}, sayData, fault.NotFound},
		"geometry":         {reply{kind: sayFailed, code: codeGeometry}, sayDone, fault.Invalid},
		"denied":           {reply{kind: sayFailed, code: codeDenied}, sayDone, fault.Invalid},
		"changed":          {reply{kind: sayFailed, code: codeChanged}, sayData, fault.Corrupt},
		"full":             {reply{kind: sayFailed, code: codeFull}, sayDone, fault.Full},
		"an unknown code":  {reply{kind: sayFailed, code: 999}, sayDone, fault.Invalid},
		"a long segment":   {reply{kind: sayData, body: segmentBytes + 1}, sayData, fault.Invalid},
		"a body of a word": {reply{kind: sayValue, body: 1}, sayValue, fault.Invalid},
		"unknown flags":    {reply{kind: sayData, flags: 2, body: 1}, sayData, fault.Invalid},
		"a code":           {reply{kind: sayDone, code: 1}, sayDone, fault.Invalid},
	} {
		if r, err := decodeReply((*[replyBytes]byte)(put(c.r)), c.want); fault.KindOf(err) != c.kind {
			t.Errorf("%s: %+v, error %v, want kind %v", name, r, err, c.kind)
		}
	}
}

// A request is anybody's bytes, once they have the key.
func FuzzRequest(f *testing.F) {
	o := sampleOrder()
	f.Add(o.append(nil))
	f.Add(appendOpen(nil, transfer.OwnerID{}, kv.Fingerprint{}))
	f.Add(appendWord(nil, 1))
	f.Add(appendEpoch(nil, askLeave, transfer.Epoch{Word: 1, Count: 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headBytes {
			return
		}
		h, err := decodeHead((*[headBytes]byte)(b))
		if err != nil {
			if fault.KindOf(err) == 0 {
				t.Errorf("error %v has no kind", err)
			}
			return
		}
		if len(b) < headBytes+h.body {
			return
		}
		body := b[headBytes:][:h.body]
		if h.kind == askCopy { // or nothing would get behind its sum
			b = bytes.Clone(b[:headBytes+h.body])
			resum(b)
			body = b[headBytes:]
		}
		var again []byte
		switch h.kind {
		case askOpen:
			again = appendOpen(nil, transfer.OwnerID(body[:16]), kv.Fingerprint(body[16:]))
		case askWord:
			again = appendWord(nil, decodeWord(body))
		case askJoin, askLeave:
			again = appendEpoch(nil, h.kind, decodeEpoch(body))
		default:
			var o order
			if err := o.decode(h.flags, body); err != nil {
				if fault.KindOf(err) != fault.Invalid {
					t.Errorf("error %v", err)
				}
				return
			}
			again = o.append(nil)
		}
		if !bytes.Equal(again, b[:headBytes+h.body]) {
			t.Errorf("%x has become %x", b, again)
		}
	})
}

// So is a reply.
func FuzzReply(f *testing.F) {
	f.Add(put(reply{kind: sayData, flags: flagSums, body: 5, a: 1, b: 2}), byte(sayData))
	f.Add(put(reply{kind: sayFailed, code: codeGone}), byte(sayValue))
	f.Fuzz(func(t *testing.T, b []byte, want byte) {
		if len(b) != replyBytes {
			return
		}
		r, err := decodeReply((*[replyBytes]byte)(b), want)
		if err == nil && (!bytes.Equal(put(r), b) || r.kind != want || r.body > segmentBytes) || err != nil && fault.KindOf(err) == 0 {
			t.Errorf("%x is %+v, error %v", b, r, err)
		}
	})
}

// A hello is anybody's bytes, key or not.
func FuzzHello(f *testing.F) {
	h := newHello(modePlain, rReader)
	f.Add(h.append(nil))
	f.Add([]byte{0x16, 3, 1, 2, 0, 1, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := readHello(bytes.NewReader(b), rReader)
		if err != nil {
			return
		}
		if !bytes.HasPrefix(b, h.append(nil)) {
			t.Errorf("%x is %+v", b, h)
		}
	})
}
