package kvferry

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// BenchmarkSequence is the whole life of a prompt of 24 pages, without bytes: what
// the books cost.
func BenchmarkSequence(b *testing.B) {
	const pages = 24
	for _, bench := range []struct {
		name    string
		prompts int // that take turns
		device  int
		host    int
	}{
		{"hit", 1, 1024, 0},                // all but the last page is matched
		{"miss", 1 << 16, 1024, 0},         // nothing is, and the coldest pages are dropped
		{"promote", 40, 2 * pages, 1024},   // all comes back from the host, for others that go there
		{"demote", 1 << 16, 1024, 1 << 14}, // nothing is matched, and the coldest pages go to the host
	} {
		b.Run(fmt.Sprintf("%s/pages=%d", bench.name, pages), func(b *testing.B) {
			g := geometry(b, kv.Config{Pages: bench.device, PageSize: 512})
			e := newEngine(b, g, Options{HostPages: bench.host}, false)
			prompts := make([]Prompt, bench.prompts)
			for i := range prompts {
				prompts[i] = Prompt{Tokens: 512 * pages, Keys: make([]page.Key, pages)}
				for j := range prompts[i].Keys {
					prompts[i].Keys[j] = page.Key{byte(i), byte(i >> 8), byte(j), 1}
				}
			}
			ctx := context.Background()
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				p := prompts[n%len(prompts)]
				n++
				s, err := e.m.Ingest(ID{Request: "a"}, p)
				noError(b, err)
				m, err := s.Match()
				noError(b, err)
				adm, err := s.Admit(ctx, p.Tokens-m.Tokens)
				noError(b, err)
				noError(b, adm.Wait(ctx))
				noError(b, s.Commit(p.Tokens-m.Tokens))
				noError(b, s.Remove())
			}
			b.ReportMetric(float64(n)*pages/b.Elapsed().Seconds(), "pages/s")
		})
	}
}
