package copier_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/copier/copiertest"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// queueModel says what the pages of both sides must hold, job by job.
type queueModel struct {
	*queueRig
	rnd       *rand.Rand
	sides     [2]side // by direction: what it reads
	jobs      [2][]*modelJob
	submitted int
	failed    int
	lose      func(step int) // the device, if it is to be lost
}

// side is one side's pages.
type side struct {
	shadows   map[string]*kv.Cache
	undefined []bool // a copy onto it has failed
	readers   []int  // unfinished jobs
	written   []bool // by an unfinished job
}

type modelJob struct {
	job copier.Job
	bad bool // must fail, and touch nothing
}

func (r *queueRig) model(seed uint64) *queueModel {
	m := &queueModel{queueRig: r, rnd: rand.New(rand.NewPCG(seed, 1))}
	for dir, pages := range [...]int{copier.Store: rigDevicePages, copier.Load: rigHostPages} {
		s := &m.sides[dir]
		s.shadows = map[string]*kv.Cache{}
		for name := range r.onDevice {
			_, src := r.ends(copier.Direction(dir), name)
			s.shadows[name] = r.shadow(src)
		}
		s.undefined, s.readers, s.written = make([]bool, pages), make([]int, pages), make([]bool, pages)
	}
	return m
}

// draw makes a job of pages that no unfinished job touches in the way.
func (m *queueModel) draw(dir copier.Direction) *modelJob {
	dst, src := &m.sides[1-dir], &m.sides[dir]
	j := &modelJob{job: copier.Job{Index: int64(m.submitted), Sealed: dir == copier.Load && m.rnd.IntN(2) == 0}}
	var to, from []page.ID
	for p := range dst.written {
		if !dst.written[p] && dst.readers[p] == 0 {
			to = append(to, page.ID(p))
		}
	}
	for p := range src.written {
		if !src.written[p] && !src.undefined[p] {
			from = append(from, page.ID(p))
		}
	}
	if len(from) == 0 {
		return j // of no pages
	}
	if m.rnd.IntN(2) == 0 { // scattered
		m.rnd.Shuffle(len(to), func(i, k int) { to[i], to[k] = to[k], to[i] })
		m.rnd.Shuffle(len(from), func(i, k int) { from[i], from[k] = from[k], from[i] })
	}
	for i := range min(len(to), m.rnd.IntN(8)) {
		j.job.Dst = append(j.job.Dst, to[i])
		j.job.Src = append(j.job.Src, from[i%len(from)])
	}
	if n := len(j.job.Dst); n > 1 && m.rnd.IntN(10) == 0 {
		j.bad = true
		j.job.Dst[n-1] = j.job.Dst[0]
	}
	return j
}

// step submits a job, or says why not.
func (m *queueModel) step(dir copier.Direction) error {
	j := m.draw(dir)
	if m.rnd.IntN(3) == 0 {
		e, err := m.dev.NewEvent()
		if err == nil {
			err = m.streams[1-dir].Record(e)
		}
		if err == nil { // the device may be lost, or the stream have failed
			j.job.Wait = e
		}
	}
	if err := m.q.Submit(dir, j.job); err != nil {
		return err
	}
	m.submitted++
	m.jobs[dir] = append(m.jobs[dir], j)
	for i := range j.job.Dst {
		m.sides[1-dir].written[j.job.Dst[i]] = true
		m.sides[dir].readers[j.job.Src[i]]++
	}
	return nil
}

// reap takes what was reported into the model.
func (m *queueModel) reap(dir copier.Direction) {
	m.t.Helper()
	dst, src := &m.sides[1-dir], &m.sides[dir]
	for _, c := range m.q.Completed(dir, nil) {
		if len(m.jobs[dir]) == 0 {
			m.t.Fatalf("%v %d was reported, and no job is open", dir, c.Index)
		}
		j := m.jobs[dir][0]
		m.jobs[dir] = m.jobs[dir][1:]
		if c.Index != j.job.Index {
			m.t.Fatalf("%v %d was reported, want %d", dir, c.Index, j.job.Index)
		}
		if j.bad && c.Err == nil {
			m.t.Fatalf("%v %d writes a page twice, and is well", dir, c.Index)
		}
		if c.Err != nil {
			m.failed++
		}
		for i := range j.job.Dst {
			d, s := j.job.Dst[i], j.job.Src[i]
			dst.written[d] = false
			src.readers[s]--
			switch {
			case j.bad:
			case c.Err != nil:
				dst.undefined[d] = true
			default:
				dst.undefined[d] = false
				for name := range m.onDevice {
					copyPage(m.t, dst.shadows[name], d, src.shadows[name], s)
				}
			}
		}
	}
}

// compare fails unless all pages are as the model says.
func (m *queueModel) compare(what string) {
	m.t.Helper()
	for dir := range m.sides {
		s := &m.sides[dir]
		for name, want := range s.shadows {
			_, real := m.ends(copier.Direction(dir), name)
			got := m.shadow(real)
			for p, undefined := range s.undefined {
				if !undefined && !bytes.Equal(pageBytes(m.t, got, page.ID(p)), pageBytes(m.t, want, page.ID(p))) {
					m.t.Fatalf("%s: page %d of what %vs read in %q is wrong", what, p, copier.Direction(dir), name)
				}
			}
		}
	}
}

// run runs up to n steps and ends the queue.
func (m *queueModel) run(what string, n int) {
	m.t.Helper()
	var releases []func()
	for step := range n {
		if m.lose != nil {
			m.lose(step)
		}
		dir := directions[m.rnd.IntN(2)]
		switch m.rnd.IntN(16) {
		case 0:
			releases = append(releases, m.held(m.streams[dir]))
		case 1, 2:
			for _, release := range releases {
				release()
			}
			releases = nil
		case 3:
			if len(releases) == 0 {
				m.must(m.q.Barrier(m.t.Context()))
			}
		}
		if err := m.step(dir); err != nil {
			if cause := m.q.Err(); cause == nil || !errors.Is(err, fault.Device) {
				m.t.Fatalf("%s: refused with %v, the queue's failure is %v", what, err, cause)
			}
			break
		}
		runtime.Gosched()
		for _, dir := range directions {
			m.reap(dir)
		}
	}
	for _, release := range releases {
		release()
	}
	m.must(m.q.Shutdown(context.Background()))
	for _, dir := range directions {
		m.reap(dir)
		if n := len(m.jobs[dir]); n > 0 {
			m.t.Fatalf("%s: %d %vs were never reported", what, n, dir)
		}
	}
	for _, s := range m.streams {
		_ = s.Sync(context.Background()) // it may have failed
	}
	m.compare(what)
}

func TestQueue_RandomJobs(t *testing.T) {
	onBackends(t, func(t *testing.T, b *queueBackend) {
		for seed := range uint64(12) {
			r := openQueue(t, b, func(o *copier.QueueOptions) { o.BatchOps = 1 + int(seed)*2 })
			m := r.model(seed)
			m.run(fmt.Sprint("seed ", seed), 150)
			r.must(r.q.Err())
			if m.submitted != 150 {
				t.Errorf("seed %d: %d jobs were submitted", seed, m.submitted)
			}
		}
	})
}

func TestQueue_RandomJobsWithFaults(t *testing.T) {
	hits, failed := map[string]int{}, 0
	for _, rules := range []string{
		"(fail copy (chance 1/60 %d))", "(fail wait (chance 1/20 %d))", "(fail signal (chance 1/60 %d))",
		"(fail stream (chance 1/60 %d))", "(half pages (chance 1/60 %d))", "(fail pages (chance 1/60 %d))",
		"(fail copy (chance 1/60 %d)) (fail signal (chance 1/2 3))",
	} {
		for seed := range uint64(8) {
			what := fmt.Sprintf(rules, seed)
			in, err := devicetest.NewInjector(what)
			if err != nil {
				t.Fatal(err)
			}
			h := openHost(t)
			b := hostBackend(t, nil)
			b.dev = in.Device(h)
			b.hold = func(s device.Stream) func() { return h.Hold(devicetest.Unwrap(s)) }
			r := openQueue(t, b, func(o *copier.QueueOptions) {
				o.BatchOps = 4
				if seed%2 == 0 || rules[1] != 'f' {
					o.Copier = copiertest.Inject(copier.NewPortable(), in)
				}
			})
			m := r.model(seed)
			m.run(what, 120)
			for _, n := range in.Hits() {
				hits[rules] += n
			}
			failed += m.failed
		}
		if hits[rules] == 0 {
			t.Errorf("%s never struck", rules)
		}
	}
	if failed == 0 {
		t.Error("no job has failed")
	}
}

func TestQueue_RandomJobsOnAFailingAccelerator(t *testing.T) {
	failed := 0
	for seed := range uint64(36) {
		call := []string{"CopyBatch", "Record", "Wait", "NewEvent", "EventDone", "lose"}[seed%6]
		class := []device.Class{device.Failed, device.Retry, device.Lost}[seed/6%3]
		b, d := acceleratorBackend(t, devicetest.Options{Mode: devicetest.Mode(seed % devicetest.Modes), Seed: seed}, nil)
		r := openQueue(t, b, func(o *copier.QueueOptions) { o.BatchOps = 4 })
		m := r.model(seed)
		if call != "lose" {
			_ = d.Refuse(call, int(seed), class) // the error that calls end with
		}
		m.lose = func(step int) {
			if call == "lose" && step == 60 {
				_ = d.Lose()
			}
		}
		m.run(fmt.Sprintf("seed %d: %s fails (%v)", seed, call, class), 120)
		failed += m.failed
	}
	if failed == 0 {
		t.Error("no job has failed")
	}
}
