package handoff

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/fault"
)

// A reader joins once and leaves once, whatever it says and however it ends.
func TestServeReader_EveryJoinHasOneLeave(t *testing.T) {
	descriptors(t)
	var mu sync.Mutex
	var log []string
	join := func(word uint32, count uint64) func(bool) {
		mu.Lock()
		defer mu.Unlock()
		if word == 9 {
			return nil
		}
		e := fmt.Sprintf("%d.%d", word, count)
		log = append(log, "join "+e)
		return func(done bool) {
			mu.Lock()
			defer mu.Unlock()
			log = append(log, fmt.Sprintf("leave %s %t", e, done))
		}
	}
	ends := make(chan error, 1)
	l := listen(t, ListenOptions{Serve: func(ctx context.Context, c *Conn) {
		if err := c.SendHello(ctx, nil, nil); err != nil {
			t.Error(err)
		}
		ends <- c.ServeReader(ctx, join)
	}})
	for _, x := range []struct {
		frames []Frame
		want   []string
		kind   fault.Kind
	}{
		{nil, nil, fault.Closed},
		{[]Frame{{Join, 1, 1}}, []string{"join 1.1", "leave 1.1 false"}, fault.Closed},
		{[]Frame{{Join, 1, 0}, {Join, 1, 0}, {Leave, 1, 0}, {Leave, 1, 0}}, []string{"join 1.0", "leave 1.0 true"}, fault.Closed},
		{[]Frame{{Leave, 1, 1}, {Join, 9, 1}, {Leave, 9, 1}}, nil, fault.Closed},
		{[]Frame{{Join, 1, 4}, {Join, 1, 5}, {Join, 1, 4}, {Leave, 1, 4}}, []string{"join 1.4", "join 1.5", "leave 1.4 false", "leave 1.5 false"}, fault.Closed},
		{[]Frame{{Join, 2, 1}, {77, 0, 0}}, []string{"join 2.1", "leave 2.1 false"}, fault.Invalid},
	} {
		mu.Lock()
		log = nil
		mu.Unlock()
		c, _ := dial(t, l, DialOptions{})
		for _, f := range x.frames {
			noError(t, c.Send(f))
		}
		if x.kind == fault.Closed {
			noError(t, c.Close())
		}
		wantKind(t, <-ends, x.kind, "")
		mu.Lock()
		if !slices.Equal(log, x.want) {
			t.Errorf("%v: %q, want %q", x.frames, log, x.want)
		}
		mu.Unlock()
	}
}

func TestJoins_SayItOnce(t *testing.T) {
	descriptors(t)
	got := make(chan Frame, 100)
	l := listen(t, ListenOptions{Serve: func(ctx context.Context, c *Conn) {
		err := c.SendHello(ctx, nil, nil)
		for err == nil {
			var f Frame
			if f, err = c.Receive(ctx); err == nil {
				got <- f
			}
		}
		close(got)
	}})
	c, _ := dial(t, l, DialOptions{})
	var j Joins
	for range 2 {
		noError(t, j.Join(c, 1, 0))
	}
	noError(t, j.Join(c, 2, 7))
	noError(t, j.Join(c, 2, 6))
	noError(t, j.Leave(c, 2, 6))
	noError(t, j.Leave(c, 3, 0))
	for range 2 {
		noError(t, j.Leave(c, 1, 0))
	}
	noError(t, c.Close())
	wantKind(t, j.Join(c, 4, 1), fault.Closed, "")
	wantKind(t, j.Leave(c, 2, 7), fault.Closed, "")
	var all []Frame
	for f := range got {
		all = append(all, f)
	}
	if want := []Frame{{Join, 1, 0}, {Join, 2, 7}, {Leave, 1, 0}}; !slices.Equal(all, want) {
		t.Errorf("%v were sent, want %v", all, want)
	}
}
