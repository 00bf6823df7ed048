package devicetest

import (
	"bytes"
	"fmt"
	"math/rand/v2"

	"github.com/kvferry/kvferry/device"
)

var randomCases = []testCase{
	{"Random_CopiesThatWaitEqualTheSameCopiesInTurn", func(r *rig) {
		for seed := range uint64(40) {
			if got, want := newProgram(seed).run(r, true); !bytes.Equal(got, want) {
				r.Fatalf("seed %d: byte %d is wrong", seed, firstDiff(got, want))
			}
		}
	}},
	{"NegativeControl_RandomCopiesThatDoNotWaitGoWrong", func(r *rig) {
		wrong := 0
		for seed := range uint64(40) {
			if got, want := newProgram(seed).run(r, false); !bytes.Equal(got, want) {
				wrong++
			}
		}
		if wrong < 20 {
			r.Errorf("%d of 40 programs without waits end with wrong bytes, want most", wrong)
		}
	}},
}

const (
	cells        = 6
	cellBytes    = 200
	programSteps = 60
	lanes        = 3
)

// program is a random list of copies among the cells of one memory, each on one
// of a few streams.
type program struct {
	name  string
	steps [programSteps]struct{ dst, src, lane int }
	order []int // in which the streams are let go
}

func newProgram(seed uint64) *program {
	rnd := rand.New(rand.NewPCG(seed, 0))
	p := &program{name: fmt.Sprint("seed", seed), order: rnd.Perm(lanes)}
	for i := range p.steps {
		dst := rnd.IntN(cells)
		p.steps[i].dst, p.steps[i].src = dst, (dst+1+rnd.IntN(cells-1))%cells
		p.steps[i].lane = rnd.IntN(lanes)
	}
	return p
}

// run runs the program with all streams held until all of it is enqueued, and
// returns the bytes that it leaves and those that it would leave in turn. When
// wait is set, each copy waits for the last writer of what it reads, and for the
// last writer and the readers since of what it writes.
func (p *program) run(r *rig, wait bool) (got, want []byte) {
	r.Helper()
	m := r.page(cells*cellBytes, 'm')
	want = contents('m', 0, cells*cellBytes)
	var streams [lanes]device.Stream
	var release [lanes]func()
	for i := range streams {
		streams[i] = r.stream(fmt.Sprint(p.name, "lane", i))
		release[i] = r.hold(streams[i])
	}
	var writer [cells]device.Event
	var readers [cells][]device.Event
	for i := range writer {
		writer[i] = r.event()
	}
	for _, step := range p.steps {
		s := streams[step.lane]
		if wait {
			for _, e := range append([]device.Event{writer[step.src], writer[step.dst]}, readers[step.dst]...) {
				r.must(s.Wait(e))
			}
		}
		r.copy(s, device.Op{Dst: m, Src: m, DstOff: int64(step.dst) * cellBytes, SrcOff: int64(step.src) * cellBytes, Bytes: cellBytes})
		e := r.record(s)
		writer[step.dst], readers[step.dst] = e, nil
		readers[step.src] = append(readers[step.src], e)
		copy(want[step.dst*cellBytes:][:cellBytes], want[step.src*cellBytes:])
	}
	for _, lane := range p.order {
		release[lane]()
		if !wait {
			r.sync(streams[lane]) // one stream after the other: as wrong as can be
		}
	}
	for _, s := range streams {
		r.sync(s)
		r.must(s.Close())
	}
	return r.read(m, 0, cells*cellBytes), want
}
