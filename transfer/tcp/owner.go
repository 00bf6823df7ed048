package tcp

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// export is one owner's cache.
type export struct {
	transfer.Export
	form  *form
	print kv.Fingerprint

	mu    sync.Mutex
	gone  bool                  // guarded by mu
	users map[*visitor]struct{} // guarded by mu; who touch its memory now
	idle  sync.Cond             // on mu: there are no users
}

// begin lets v touch the memory until end, and write for as long as one segment may take.
// It reports false when the export was withdrawn.
func (x *export) begin(v *visitor) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.gone {
		return false
	}
	_ = v.tcp.SetWriteDeadline(time.Now().Add(v.e.o.Stall)) // of a closed connection: writing says so
	x.users[v] = struct{}{}
	return true
}

func (x *export) end(v *visitor) {
	x.mu.Lock()
	if delete(x.users, v); len(x.users) == 0 {
		x.idle.Broadcast()
	}
	x.mu.Unlock()
}

// withdraw waits until nobody touches the memory any more. Who is sending from it to a
// reader that doesn't take it is not waited for: the write ends now.
func (x *export) withdraw() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.gone = true
	for v := range x.users {
		_ = v.tcp.SetWriteDeadline(time.Unix(1, 0)) // or its connection is closed already
	}
	for len(x.users) > 0 {
		x.idle.Wait()
	}
}

// visitor is one connection of a reader, at the owner's side. Its goroutine goes through
// these states; whatever is not said in its state ends the connection:
//
//	handshake → open → (word | copy | join | leave)*
type visitor struct {
	e    *Engine
	tcp  net.Conn
	conn net.Conn // what is spoken over: tcp, or TLS on it
	in   *bufio.Reader
	x    *export // from open on

	admitted bool // by the engine, at open

	head   [headBytes]byte
	body   [smallBody]byte
	answer [replyBytes]byte
	joined map[transfer.Epoch]func(done bool)
	sweep  int // how many may be joined before those that have ended are left out
}

const (
	requestBuffer = 4 << 10
	smallBody     = 32 // of every request but copy
	leastSweep    = 64
)

// admit is the handshake. Whoever doesn't come to its end in time has ended.
func (v *visitor) admit() (err error) {
	if err := v.tcp.SetDeadline(time.Now().Add(v.e.o.Handshake)); err != nil {
		return err
	}
	v.conn, err = v.e.speak(v.e.ctx, v.tcp, rOwner)
	if r, ok := errors.AsType[tls.RecordHeaderError](err); ok && string(r.RecordHeader[:len(magic)]) == magic {
		err = errMode(false)
	}
	return err
}

// serve answers requests until the connection ends.
func (v *visitor) serve() error {
	v.in, v.sweep = bufio.NewReaderSize(v.conn, requestBuffer), leastSweep
	for {
		h, err := v.request()
		if err == nil {
			err = v.do(h)
		}
		if err != nil {
			return err
		}
	}
}

// request reads the head of the next request: once it has opened an owner, a reader may
// be silent for as long as it likes, but not in the middle of one.
func (v *visitor) request() (h head, err error) {
	if v.x != nil {
		if err := v.tcp.SetReadDeadline(time.Time{}); err != nil {
			return h, err
		}
		if _, err := v.in.Peek(1); err != nil {
			return h, err
		}
		if err := v.tcp.SetDeadline(time.Now().Add(v.e.o.Handshake)); err != nil {
			return h, err
		}
	} // else the handshake's time is not over
	if _, err := io.ReadFull(v.in, v.head[:]); err != nil {
		return h, err
	}
	if h, err = decodeHead(&v.head); err == nil && (v.x == nil) != (h.kind == askOpen) {
		err = fault.New(fault.Invalid, "request", "kind %d out of its turn", h.kind)
	}
	if err != nil {
		return h, v.fail(codeInvalid, err)
	}
	return h, nil
}

// do reads the body of a request, and answers.
func (v *visitor) do(h head) error {
	if h.kind == askCopy {
		return v.copy(h)
	}
	body := v.body[:h.body]
	if _, err := io.ReadFull(v.in, body); err != nil {
		return err
	}
	switch h.kind {
	case askOpen:
		owner, print := decodeOpen(body)
		v.e.mu.Lock()
		v.x = v.e.exports[owner]
		v.e.mu.Unlock()
		switch {
		case v.x == nil:
			return v.fail(codeGone, errGone())
		case v.x.print != print:
			return v.fail(codeGeometry, fault.New(fault.Invalid, "request", "is about another geometry"))
		}
		if err := v.e.admit(v); err != nil {
			return v.fail(codeFull, err)
		}
		return v.say(reply{kind: sayDone})
	case askWord:
		return v.word(decodeWord(body))
	case askJoin:
		return v.join(decodeEpoch(body))
	default:
		e := decodeEpoch(body)
		if leave := v.joined[e]; leave != nil {
			delete(v.joined, e)
			leave(true)
		}
		return nil
	}
}

func (v *visitor) copy(h head) error {
	fl := v.e.flow()
	defer v.e.flows.Put(fl)
	fl.ask = slices.Grow(fl.ask[:0], h.body)[:h.body]
	if _, err := io.ReadFull(v.in, fl.ask); err != nil {
		return err
	}
	err := fl.order.decode(h.flags, fl.ask)
	if err == nil {
		err = v.x.form.check(&fl.order)
	}
	switch {
	case errors.Is(err, fault.Corrupt):
		return v.fail(codeChanged, err)
	case err != nil:
		return v.fail(codeInvalid, err)
	}
	return v.send(fl)
}

// word answers with an epoch word: loaded after the request came.
func (v *visitor) word(i uint32) error {
	if !v.x.begin(v) {
		return v.fail(codeGone, errGone())
	}
	count, err := v.x.Words.LoadUint64(int64(i) * 8)
	v.x.end(v)
	if err != nil {
		return v.fail(codeInvalid, err)
	}
	return v.say(reply{kind: sayValue, a: count, b: uint64(i)})
}

// join joins a publication until the reader leaves it, or its connection ends. Those that
// have ended otherwise are forgotten now and then, so that there are never many more than
// the owner has.
func (v *visitor) join(e transfer.Epoch) error {
	if v.joined[e] != nil {
		return nil
	}
	if !v.x.begin(v) {
		return errGone()
	}
	defer v.x.end(v)
	if len(v.joined) >= v.sweep {
		for old, leave := range v.joined {
			if count, err := v.x.Words.LoadUint64(int64(old.Word) * 8); err != nil || count != old.Count {
				delete(v.joined, old)
				leave(false)
			}
		}
		v.sweep = max(2*len(v.joined), leastSweep)
	}
	if leave := v.x.Join(e); leave != nil {
		if v.joined == nil {
			v.joined = map[transfer.Epoch]func(bool){}
		}
		v.joined[e] = leave
	}
	return nil
}

// leave ends what the reader has joined: it has gone.
func (v *visitor) leave() {
	for e, leave := range v.joined {
		delete(v.joined, e)
		leave(false)
	}
}

func (v *visitor) say(r reply) error {
	r.put(&v.answer)
	_, err := v.conn.Write(v.answer[:])
	return err
}

// fail tells the reader why its connection ends, and returns err, which ends it.
func (v *visitor) fail(code uint16, err error) error {
	_ = v.tcp.SetWriteDeadline(time.Now().Add(v.e.o.Handshake)) // which a withdrawal may have ended
	_ = v.say(reply{kind: sayFailed, code: code})               // the connection ends anyway
	return err
}
