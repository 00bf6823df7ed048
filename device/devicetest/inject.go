package devicetest

import (
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// Injector makes calls go wrong by rules (see [ParseRules]). It counts the calls of
// every site, so what goes wrong depends on nothing but the rules and the order of the
// calls. All methods may be called from any goroutine.
//
// A device is wrapped by [Injector.Device], a copier by copiertest.Inject. Sites that
// have no seam of their own ("flip host byte") are asked for by the test, which does
// what the rule says.
type Injector struct {
	rules []Rule

	mu    sync.Mutex
	calls []uint64 // by rule: calls of its site; guarded by mu
	hits  []int    // by rule; guarded by mu
}

// NewInjector makes an injector of rules, as ParseRules reads them.
func NewInjector(rules string) (*Injector, error) {
	parsed, err := ParseRules(rules)
	if err != nil {
		return nil, err
	}
	return &Injector{rules: parsed, calls: make([]uint64, len(parsed)), hits: make([]int, len(parsed))}, nil
}

// Hit counts a call of what ("fail copy"), and returns the error that it is to end
// with when a rule says so, nil otherwise. For effects that are no failure the error
// only says which rule it was.
func (in *Injector) Hit(what What) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	var hit error
	for i := range in.rules {
		if in.rules[i].What != what {
			continue
		}
		in.calls[i]++
		if hit == nil && in.rules[i].When.holds(in.calls[i]) {
			in.hits[i]++
			hit = fault.New(fault.Device, "injected", "call %d of %v", in.calls[i], in.rules[i])
		}
	}
	return hit
}

// Hits says for each rule how often it has struck, in the order of the rules.
func (in *Injector) Hits() []int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return append([]int(nil), in.hits...)
}

// Device wraps d: Alloc obeys "fail alloc", and its streams obey "fail copy", "fail
// record", "fail wait" and "fail signal", where a refused call has done nothing and the
// stream is well, and "fail stream": the copy is enqueued, fails when its turn comes,
// and the stream with it. That one needs d to be the host device.
func (in *Injector) Device(d device.Device) device.Device { return &injected{d, in} }

type injected struct {
	device.Device
	in *Injector
}

func (d *injected) Alloc(bytes int64) (*device.Memory, error) {
	if err := d.in.Hit(FailAlloc); err != nil {
		return nil, err
	}
	return d.Device.Alloc(bytes)
}

func (d *injected) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	if err != nil {
		return nil, err
	}
	return &injectedStream{s, d}, nil
}

type injectedStream struct {
	device.Stream
	of *injected
}

// Unwrap returns the stream that s wraps, or s itself: host devices hold their own
// streams only.
func Unwrap(s device.Stream) device.Stream {
	if w, ok := s.(*injectedStream); ok {
		return w.Stream
	}
	return s
}

func (s *injectedStream) Copy(ops []device.Op) error {
	if err := s.of.in.Hit(FailCopy); err != nil {
		return err
	}
	if err := s.of.in.Hit(FailStream); err != nil {
		d, ok := s.of.Device.(interface {
			Fail(s device.Stream, err error)
		})
		if !ok {
			return fmt.Errorf("devicetest: %q needs a host device, not %T", FailStream, s.of.Device)
		}
		d.Fail(s.Stream, err)
	}
	return s.Stream.Copy(ops)
}

func (s *injectedStream) Record(e device.Event) error {
	if err := s.of.in.Hit(FailRecord); err != nil {
		return err
	}
	return s.Stream.Record(e)
}

func (s *injectedStream) Wait(e device.Event) error {
	if err := s.of.in.Hit(FailWait); err != nil {
		return err
	}
	return s.Stream.Wait(e)
}

func (s *injectedStream) Signal(t *device.Ticket) error {
	if err := s.of.in.Hit(FailSignal); err != nil {
		return err
	}
	return s.Stream.Signal(t)
}
