package local

import (
	"testing"

	"github.com/kvferry/kvferry/transfer"
)

// A reader that never acknowledges keeps no more than what lives: one publication a word.
func TestSource_KeepsOnePublicationOfAWord(t *testing.T) {
	ended := map[transfer.Epoch]bool{}
	s := &source{joined: map[uint32]reading{}, export: &export{Export: transfer.Export{Join: func(e transfer.Epoch) func(bool) {
		return func(done bool) { ended[e] = done }
	}}}}
	for i := range 100 {
		for range 2 {
			if err := s.Join(transfer.Epoch{Word: uint32(i % 2), Count: uint64(1 + i/2)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(s.joined) != 2 || len(ended) != 98 {
		t.Errorf("%d publications are joined and %d were left, of 100 of 2 words", len(s.joined), len(ended))
	}
	last := transfer.Epoch{Word: 1, Count: 50}
	if err := s.Leave(last); err != nil || !ended[last] {
		t.Errorf("%v; %v was not left as done", err, last)
	}
	if err := s.Close(); err != nil || len(ended) != 100 {
		t.Errorf("%v; %d were left of 100", err, len(ended))
	}
}
