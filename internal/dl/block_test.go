package dl

import (
	"strings"
	"testing"
)

func newBlock(tb testing.TB, words int) *Block {
	tb.Helper()
	b, err := NewBlock(words)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(b.Free)
	return b
}

func TestBlock_IsZeroedMemoryOnAPageAndSeenTwice(t *testing.T) {
	for _, words := range []int{-1, 0, 1, 100, 1 << 16} {
		b := newBlock(t, words)
		n := max(1, words)
		if len(b.Words) != n || len(b.Bytes) != 8*n || b.Addr == 0 || b.Addr%4096 != 0 {
			t.Fatalf("%d words: %d words, %d bytes at %#x", words, len(b.Words), len(b.Bytes), b.Addr)
		}
		for i, w := range b.Words {
			if w != 0 {
				t.Fatalf("%d words: word %d is %#x", words, i, w)
			}
		}
		b.Words[n-1] = 0x0102030405060708
		if got := b.Bytes[8*n-8]; got != 8 {
			t.Errorf("%d words: the last word begins with byte %d", words, got)
		}
	}
}

func TestBlock_ThatCannotBeMappedIsAnError(t *testing.T) {
	if b, err := NewBlock(1 << 58); err == nil {
		b.Free()
		t.Error("got 2^61 bytes")
	}
}

func TestBlock_Strings(t *testing.T) {
	b := newBlock(t, 2)
	for _, tc := range []struct {
		off  int
		put  string
		want string
	}{
		{0, "", ""},
		{0, "abc", "abc"},
		{3, "de", "de"},
		{0, strings.Repeat("x", 15), strings.Repeat("x", 15)},
		{0, strings.Repeat("y", 16), strings.Repeat("y", 15)}, // cut: the 0 has to fit
		{15, "z", ""},
	} {
		b.PutString(tc.off, tc.put)
		if got := b.String(tc.off); got != tc.want {
			t.Errorf("%q at %d: got %q, want %q", tc.put, tc.off, got, tc.want)
		}
	}
	for i := range b.Bytes {
		b.Bytes[i] = 'n'
	}
	if got := b.String(4); got != strings.Repeat("n", 12) {
		t.Errorf("a string without its 0: got %q", got)
	}
	if got := GoString(0); got != "" {
		t.Errorf("at address 0: got %q", got)
	}
	b.PutString(0, "abc")
	if got := GoString(b.Addr + 1); got != "bc" {
		t.Errorf("got %q", got)
	}
}

func TestMapped_AndFileKnowNothingOfWhatIsNotThere(t *testing.T) {
	if got := Mapped("libof-nobody"); got != nil {
		t.Errorf("got %v", got)
	}
	if got := Func(1).File(); got != "" {
		t.Errorf("address 1 lies in %q", got)
	}
}
