package kvferry

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// plagues are what goes wrong in the metamorphic test, by turns: calls of the device,
// of its streams and of the copier, and bytes of the host pool.
var plagues = []string{
	"(fail copy (every 7))",
	"(fail pages (chance 1/8 1)) (half pages (chance 1/8 2))",
	"(fail record (every 5)) (fail wait (every 7)) (fail signal (every 6))",
	"(flip host byte (every 2))",
	"(fail stream (at 20))",
	"(fail pages (from 1))",
	"(fail copy (chance 1/20 3)) (half pages (chance 1/20 4)) (fail signal (chance 1/20 5)) (flip host byte (chance 1/10 6)) (fail stream (at 40))",
}

// plagued is one run with faults. It prints as a line of testdata/metamorphic/*.runs.
type plagued struct {
	config string
	seed   uint64
	ops    int
	rules  string
}

func (x plagued) String() string {
	return fmt.Sprintf("config=%s seed=%d ops=%d rules=%s", x.config, x.seed, x.ops, x.rules)
}

func parsePlagued(line string) (x plagued, err error) {
	if _, err = fmt.Sscanf(line, "config=%s seed=%d ops=%d", &x.config, &x.seed, &x.ops); err != nil {
		return x, err
	}
	_, x.rules, _ = strings.Cut(line, "rules=")
	if x.String() != line {
		return x, fmt.Errorf("%q is no run: %q is", line, x)
	}
	return x, nil
}

// play plays the run on a manager of its own. In spite of all faults everybody must
// see the same bytes: a sequence that is struck says so, by a named error, and is
// computed again.
func (x plagued) play(t *testing.T) *player {
	for _, c := range configs() {
		if c.name != x.config {
			continue
		}
		ops := generate(rand.New(rand.NewPCG(x.seed, 0)), x.ops)
		in := must(devicetest.NewInjector(x.rules))(t)
		p := &player{e: c.open(t, ops, in), rng: rand.New(rand.NewPCG(x.seed, 1))}
		p.still = !c.through // what is written through is summed whenever it arrives
		got, err := p.play(ops)
		if err == nil {
			err = same(got, expected(ops))
		}
		if err == nil {
			err = p.finish()
		}
		if err != nil {
			t.Fatalf("%v\nkeep it as a line of testdata/metamorphic/kept.runs:\n%v", err, x)
		}
		return p
	}
	t.Fatalf("there is no configuration %q", x.config)
	return nil
}

// TestMetamorphic_Faults plays random operations while things go wrong.
//
//	go test . -run TestMetamorphic_Faults -seed=7 -ops=1000000
func TestMetamorphic_Faults(t *testing.T) {
	var runs []plagued
	for _, c := range configs() {
		for _, rules := range plagues {
			if c.host > 0 && c.device != "cuda" && c.device != "hip" { // whose streams fail in tests of their own
				runs = append(runs, plagued{c.name, *flagSeed, 0, rules})
			}
		}
	}
	hits := map[string]int{}
	again, away, played := 0, 0, 0
	for i, x := range runs {
		x.seed += uint64(i)
		x.ops = max(1, *flagOps/len(runs))
		t.Run(fmt.Sprintf("%s/%d", x.config, i%len(plagues)), func(t *testing.T) {
			p := x.play(t)
			for i, r := range must(devicetest.ParseRules(x.rules))(t) {
				hits[r.String()] += p.e.in.Hits()[i]
			}
			again, away, played = again+p.again, away+p.away, played+1
		})
	}
	if played < len(runs) || *flagOps < 50_000 {
		return
	}
	for _, rules := range plagues {
		for _, r := range must(devicetest.ParseRules(rules))(t) {
			if hits[r.String()] == 0 {
				t.Errorf("%v never struck", r)
			}
		}
	}
	if again == 0 || away == 0 {
		t.Errorf("%d sequences were computed again, %d offloaded: too little happened", again, away)
	}
}

// Runs that once went wrong.
func TestMetamorphic_KeptRuns(t *testing.T) {
	files := must(filepath.Glob("testdata/metamorphic/*.runs"))(t)
	if len(files) == 0 {
		t.Fatal("no runs in testdata/metamorphic")
	}
	for _, file := range files {
		for line := range strings.SplitSeq(string(must(os.ReadFile(file))(t)), "\n") {
			if line == "" || line[0] == '#' {
				continue
			}
			x := must(parsePlagued(line))(t)
			t.Run(x.config, func(t *testing.T) { x.play(t) })
		}
	}
}

// struck reports whether err is one of those that faults may cause.
func struck(err error) bool { return errors.Is(err, fault.Device) || errors.Is(err, fault.Corrupt) }

// compute brings a sequence that was struck to where the model is, from nothing.
func (p *player) compute(seq int) error {
	s, r := p.m.seqs[seq], p.runs[seq]
	p.again++
	if err := r.reset(true); err != nil || s.admitted == 0 {
		return err
	}
	err := r.admit(p.e.t.Context(), s.admitted)
	for tries := 0; struck(err) && tries < 100; tries++ { // evicting may be struck too
		err = r.admit(p.e.t.Context(), s.admitted)
	}
	if err == nil {
		err = r.s.SetPosition(s.position, s.position/2)
	}
	if err != nil {
		return fmt.Errorf("computing %v again: %w", r.s.ID(), err)
	}
	return r.commit(s.committed)
}

// flip turns a bit of some host page, when the rules say so and nothing is on its way.
func (p *player) flip() {
	if p.e.in == nil || !p.still || p.e.in.Hit(devicetest.FlipByte) == nil {
		return
	}
	_ = p.settle()
	_ = p.e.m.Copies().Sync(p.e.t.Context()) // and what a refused Reload had begun
	pool := p.e.m.Pool()
	b := must(pool.Cache().Page(page.ID(p.rng.IntN(pool.Pages()))))(p.e.t)
	b[p.rng.IntN(len(b))] ^= 1 << p.rng.IntN(8)
}
