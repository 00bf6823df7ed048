package mooncake

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// Verb is the only argument of a process that is to call [Serve]: what
// Options.Executable is started with.
const Verb = "mooncake-child"

// childFD is the child's end of the socket.
const childFD = 3

// maxCalls is how many calls a child runs at a time. More are a parent that is broken.
const maxCalls = 256

// Serve is a child process: it does what its parent says on descriptor 3 until that is
// closed, which the parent's death does too. The process ends when it returns: what the
// library still does ends with it. Kinds: fault.Invalid (a parent that is none).
func Serve() error {
	f := os.NewFile(childFD, "parent")
	c, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return fault.Wrap(fault.Invalid, "descriptor 3: no socket of a parent", err).
			Hint("%s is started by kvferry itself", Verb)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return fault.New(fault.Invalid, "descriptor 3", "no socket of a parent").Hint("%s is started by kvferry itself", Verb)
	}
	s := &server{conn: conn, stops: map[uint64]chan struct{}{}}
	return s.serve()
}

// server is the child's side.
type server struct {
	conn *net.UnixConn
	core *core // set by the first call, before any other is looked at

	mu      sync.Mutex
	running int                      // guarded by mu
	stops   map[uint64]chan struct{} // guarded by mu; of reads that are running, by call

	out  sync.Mutex
	room []byte // guarded by out
}

func (s *server) serve() error {
	packet := make([]byte, frameMost+1)
	oob := make([]byte, unix.CmsgSpace(maxPieces*4))
	for {
		n, on, flags, _, err := s.conn.ReadMsgUnix(packet, oob)
		if errors.Is(err, io.EOF) || err == nil && n == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		fds, err := descriptors(oob[:on])
		if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			err = fault.New(fault.Invalid, "frame", "arrived cut short")
		}
		var f frame
		if err == nil {
			err = f.parse(packet[:n])
		}
		if err == nil && f.kind != mapCall && len(fds) > 0 {
			err = fault.New(fault.Invalid, "frame", "of type %d comes with descriptors", f.kind)
		}
		if err == nil {
			err = s.begin(&f, fds)
		} else {
			closeAll(fds)
		}
		if err != nil {
			return err
		}
	}
}

// descriptors returns what came along with a packet.
func descriptors(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		if some, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // of memory, which has nothing to write back
	}
}

// begin starts a call. An error is a parent that is broken.
func (s *server) begin(f *frame, fds []int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case f.kind == stopCall:
		if stop := s.stops[f.call]; stop != nil {
			delete(s.stops, f.call)
			close(stop)
		}
		return nil
	case f.kind == answerGood || f.kind == answerBad:
		return fault.New(fault.Invalid, "frame", "is an answer, and nothing was asked")
	case (f.kind == startCall) != (s.core == nil):
		return fault.New(fault.Invalid, "frame", "of type %d comes at the wrong time", f.kind)
	case s.running >= maxCalls:
		return fault.New(fault.Full, "frame", "is one call too many: %d are running", s.running)
	}
	if f.kind == startCall { // nothing else is looked at before it is over
		f.config.batch = batchMost
		core, err := newCore(f.config)
		s.core = core
		if err == nil {
			err = fence(f.config.listen)
		}
		answer := &frame{kind: answerGood, call: f.call}
		if err == nil {
			answer.data = appendText(appendText(nil, core.name), core.lib.version)
		}
		if sendErr := s.answer(answer, err); err == nil {
			err = sendErr
		}
		return err // without an engine there is nothing to serve
	}
	stop := make(chan struct{})
	if f.kind == readCall || f.kind == wordsCall {
		s.stops[f.call] = stop
	}
	s.running++
	go func() {
		answer := &frame{kind: answerGood, call: f.call}
		err := s.do(f, fds, stop, answer)
		s.mu.Lock()
		s.running--
		delete(s.stops, f.call)
		s.mu.Unlock()
		_ = s.answer(answer, err) // who does not hear it has gone, which serve sees
	}()
	return nil
}

// do runs a call.
func (s *server) do(f *frame, fds []int, stop <-chan struct{}, answer *frame) (err error) {
	switch f.kind {
	case mapCall:
		var r *region
		if f.remote { // somebody may have been quick
			err = fence(s.core.listen)
		}
		if err == nil {
			r, err = mapRegion(f.bytes, f.pieces, fds, f.write)
		}
		closeAll(fds)
		if err == nil {
			if err = s.core.add(f.number, r, f.remote); err != nil {
				r.unmap()
				return err
			}
			answer.data = appendWord(nil, uint64(r.base))
		}
	case unmapCall:
		err = s.core.remove(f.number)
	case openCall:
		var number uint32
		if number, err = s.core.open(f.text); err == nil {
			answer.data = appendWord(nil, uint64(number))
		}
	case readCall:
		err = s.core.read(stop, f.number, f.requests)
	case wordsCall:
		n := 0
		for _, w := range f.words {
			n += int(w.bytes)
		}
		answer.data = make([]byte, n)
		err = s.core.words(stop, f.number, f.words, answer.data)
	}
	return err
}

// answer sends an answer, or the error instead.
func (s *server) answer(f *frame, err error) error {
	if err != nil {
		f = &frame{kind: answerBad, call: f.call, fault: plain(err)}
	}
	s.out.Lock()
	defer s.out.Unlock()
	s.room = f.append(s.room[:0])
	_, err = s.conn.Write(s.room)
	return err
}

// plain is err as a frame carries it.
func plain(err error) *fault.Error {
	kind := fault.KindOf(err)
	if kind == 0 {
		kind = fault.Device
	}
	return &fault.Error{Kind: kind, Detail: err.Error(), Remedy: fault.RemedyOf(err)}
}
