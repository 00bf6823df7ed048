package transfer

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// frail is an engine that loses its offers.
type frail struct {
	fakeEngine
	made, withdrawn int
	failures        int              // of the next offers
	early           bool             // they are lost before they are made
	lost            func(why error)  // of the last offer
	late            func(first bool) // called in Offer, if not nil
}

func newFrail() *frail {
	f := &frail{fakeEngine: fakeEngine{name: "frail"}}
	f.offers = func(x Export) ([]byte, func(), error) {
		if f.late != nil {
			f.late(f.made == 0)
		}
		if f.failures > 0 {
			f.failures--
			return nil, nil, fault.New(fault.Memory, "process", "can't be started")
		}
		f.made++
		f.lost = x.Lost
		if f.early {
			f.early = false
			x.Lost(errors.New("at once"))
		}
		return fmt.Appendf(nil, "offer %d", f.made), func() { f.withdrawn++ }, nil
	}
	return f
}

// offersOf returns what a descriptor of p offers.
func offersOf(tb testing.TB, p *Publisher) (list []string) {
	tb.Helper()
	for _, o := range must(p.Descriptor())(tb).Offers {
		list = append(list, o.Engine+": "+string(o.Data))
	}
	return list
}

// A lost offer is in no descriptor, and nobody who publishes waits for the next one.
func TestPublisher_OffersAnewWhatWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		f := newFrail()
		var p *Publisher
		var changes []string
		p = must(NewPublisher(PublisherOptions{
			Cache: pair.far, Host: pair.host, Engines: []Engine{f, pair.engine},
			Changed: func(engine string, lost error) {
				changes = append(changes, fmt.Sprintf("%s %v: %q", engine, lost, offersOf(t, p)))
			},
		}))(t)
		wants := func(want ...string) {
			t.Helper()
			synctest.Wait()
			if got := offersOf(t, p); strings.Join(got, ", ") != strings.Join(want, ", ") {
				t.Fatalf("offers %q, want %q", got, want)
			}
		}
		wants("frail: offer 1", "fake: fake")

		f.failures = 2
		f.lost(errors.New("gone"))
		f.lost(errors.New("gone twice"))
		wants("fake: fake")
		must(p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute}))(t)
		<-time.After(offerFirst + 2*offerFirst - 1)
		wants("fake: fake")
		<-time.After(1)
		wants("frail: offer 2", "fake: fake")

		f.early = true
		f.lost(errors.New("gone"))
		wants("fake: fake") // what doesn't last is not made again at once
		<-time.After(4 * offerFirst)
		wants("fake: fake") // 3 was lost when it was made
		<-time.After(8*offerFirst - 1)
		wants("fake: fake")
		<-time.After(1)
		wants("frail: offer 4", "fake: fake")
		<-time.After(offerMost)
		f.lost(errors.New("gone"))
		wants("frail: offer 5", "fake: fake") // 4 has lasted
		noError(t, p.Close())
		f.lost(errors.New("after Close"))
		synctest.Wait()
		if f.made != 5 || f.withdrawn != 5 {
			t.Errorf("%d offers were made and %d withdrawn, want 5 of each", f.made, f.withdrawn)
		}
		for i, want := range []string{
			`frail gone: ["fake: fake"]`, `frail <nil>: ["frail: offer 2" "fake: fake"]`, `frail gone: ["fake: fake"]`,
		} {
			if changes[i] != want {
				t.Errorf("change %d: %s, want %s", i, changes[i], want)
			}
		}
	})
}

func TestPublisher_SaysWhatItLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		f := newFrail()
		p := must(NewPublisher(PublisherOptions{Cache: pair.far, Host: pair.host, Engines: []Engine{f}}))(t)
		f.failures = 1 << 30
		f.lost(errors.New("the child died"))
		synctest.Wait()
		_, err := p.Publish(Lease{Pages: []page.ID{1}, TTL: time.Minute})
		if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "the child died") || fault.RemedyOf(err) == "" {
			t.Errorf("error %v, want kind device, why, and a remedy", err)
		}
		<-time.After(time.Hour)
		synctest.Wait()
		if tries := 1<<30 - f.failures; tries < 360 || tries > 370 {
			t.Errorf("%d tries in an hour", tries)
		}
		noError(t, p.Close()) // waits for no pause
		if f.withdrawn != 1 {
			t.Errorf("withdrawn %d times", f.withdrawn)
		}
	})
}

// What is offered while a publisher closes is withdrawn too.
func TestPublisher_ClosesWhileItOffersAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := newPair(t)
		f := newFrail()
		goOn := make(chan struct{})
		f.late = func(first bool) {
			if !first {
				<-goOn
			}
		}
		p := must(NewPublisher(PublisherOptions{Cache: pair.far, Host: pair.host, Engines: []Engine{f}}))(t)
		f.lost(errors.New("gone"))
		synctest.Wait()
		closed := make(chan error)
		go func() { closed <- p.Close() }()
		synctest.Wait()
		close(goOn)
		noError(t, <-closed)
		if f.made != 2 || f.withdrawn != 2 {
			t.Errorf("%d offers were made and %d withdrawn", f.made, f.withdrawn)
		}
	})
}
