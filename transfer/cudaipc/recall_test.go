//go:build !nogpu

package cudaipc

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/handoff"
	"github.com/kvferry/kvferry/transfer"
)

// A reader that stands still in the middle of its hello doesn't keep an owner from
// withdrawing, and one that goes on then is asked for the memory as all others were.
func TestRecall_InTheMiddleOfAHello(t *testing.T) {
	const patience = 20 * time.Second
	dir := socketDir(t)
	for _, goesOn := range []bool{false, true} {
		ex := &export{
			Export:  transfer.Export{Join: func(transfer.Epoch) func(bool) { return nil }},
			payload: make([]byte, handoff.MaxPayload), conns: map[*handoff.Conn]struct{}{}, empty: make(chan struct{}),
		}
		l := must(handoff.Listen(handoff.ListenOptions{Dir: filepath.Join(dir, "s"), Prefix: "cudaipc", Serve: ex.serve}))(t)
		socket := must(net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(dir, "s", l.Name()), Net: "unixpacket"}))(t)
		noError(t, socket.SetDeadline(time.Now().Add(patience)))
		packet := make([]byte, handoff.MaxPayload)
		must(socket.Read(packet))(t) // the hello has begun, and does not fit into the socket

		linger, over := time.Millisecond, make(chan struct{})
		if goesOn {
			linger = 2 * patience
		}
		go func() {
			defer close(over)
			ex.recall(linger)
		}()
		if goesOn {
			for closing := false; !closing; {
				ex.mu.Lock()
				closing = ex.closing
				ex.mu.Unlock()
			}
			const frame = 16
			n := 0
			for n != frame {
				n = must(socket.Read(packet))(t)
			}
			if kind := handoff.Kind(packet[1]); kind != recalled {
				t.Errorf("the frame behind the hello has kind %d, want %d", kind, recalled)
			}
			noError(t, socket.Close())
		}
		select {
		case <-over:
		case <-time.After(patience):
			t.Fatal("recall waits for a reader that reads nothing")
		}
		noError(t, l.Close())
		_ = socket.Close()
	}
}
