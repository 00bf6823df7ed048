package transfer

import (
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/fault"
)

// The pauses between tries to make an offer again: longer and longer, also when each is
// made and lost at once. One that lasted for offerMost begins again without a pause.
const offerFirst, offerMost = 100 * time.Millisecond, 10 * time.Second

func longer(pause time.Duration) time.Duration {
	return min(max(2*pause, offerFirst), offerMost)
}

// offers are what the engines of one publisher offer. One that its engine loses
// ([Export.Lost]) is in no descriptor any more, and is made again in the background, so
// that nobody who publishes waits for that.
type offers struct {
	changed func(engine string, lost error) // PublisherOptions.Changed, or nothing
	stop    chan struct{}
	again   sync.WaitGroup // what is made again

	mu     sync.Mutex
	closed bool     // guarded by mu
	made   []*offer // guarded by mu; in the order of the engines
}

// offer is what one engine offers.
type offer struct {
	engine Engine
	data   []byte
	recall func()
	since  time.Time
	pause  time.Duration // before the first try to make it again, if it doesn't last
	turn   *sync.Mutex   // held while it is made again: what Changed is told of an engine comes in order
	lost   error         // guarded by offers.mu; why nobody can read by it
}

// make has e offer x, instead of an offer that is lost unless that is nil. It does nothing
// where e lets nobody read. Kinds: those of [Engine.Offer].
func (o *offers) make(e Engine, x Export, instead *offer) error {
	made, settled := &offer{engine: e, turn: new(sync.Mutex)}, make(chan struct{})
	if instead != nil {
		made.turn, made.pause = instead.turn, longer(instead.pause)
	}
	defer close(settled)
	var once sync.Once
	x.Lost = func(why error) {
		once.Do(func() {
			go func() { // of a goroutine's own: engines may call before they return from Offer
				<-settled
				o.lose(made, x, why)
			}()
		})
	}
	data, recall, err := e.Offer(x)
	if err != nil {
		return fault.Wrap(kindOr(err, fault.Device), "engine "+e.Name(), err)
	}
	if recall == nil {
		return nil
	}
	made.data, made.recall, made.since = slices.Clone(data), recall, time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	if i := slices.Index(o.made, instead); i >= 0 {
		o.made[i] = made
	} else {
		o.made = append(o.made, made)
	}
	return nil
}

// lose takes an offer out of descriptors, and has it made again.
func (o *offers) lose(made *offer, x Export, why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || made.recall == nil { // or it never was an offer
		return
	}
	made.lost = fault.Wrap(fault.Device, "engine "+made.engine.Name(), why).
		Hint("publish again in a moment: it offers anew")
	o.again.Go(func() { o.renew(made, x, why) })
}

// renew makes a lost offer again, however often that takes.
func (o *offers) renew(made *offer, x Export, why error) {
	made.turn.Lock()
	defer made.turn.Unlock()
	o.changed(made.engine.Name(), why)
	made.recall()
	if time.Since(made.since) >= offerMost {
		made.pause = 0
	}
	for again := true; again; {
		wait := time.NewTimer(made.pause)
		select {
		case <-wait.C:
		case <-o.stop:
			wait.Stop()
			return
		}
		if again = o.make(made.engine, x, made) != nil; again {
			made.pause = longer(made.pause)
		}
	}
	o.changed(made.engine.Name(), nil)
}

// list returns the offers that peers can read by, and what has become of the others.
func (o *offers) list() (list []Offer, lost []error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, made := range o.made {
		if made.lost != nil {
			lost = append(lost, made.lost)
			continue
		}
		list = append(list, Offer{Engine: made.engine.Name(), Data: made.data})
	}
	return list, lost
}

// recall withdraws them all, and returns when nothing makes one again. With no lock held:
// an engine may wait for readers that leave.
func (o *offers) recall() {
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	close(o.stop)
	o.again.Wait()
	for _, made := range o.made { // nobody changes them any more
		if made.lost == nil {
			made.recall()
		}
	}
}
