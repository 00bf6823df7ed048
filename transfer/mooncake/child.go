package mooncake

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

const (
	startLimit = 20 * time.Second // for a child to load the library: seconds on a busy machine
	leftLimit  = time.Second      // for what a process has left of its pipes and its socket
	tailLines  = 6                // that are kept of what a child writes
	lineBytes  = 1 << 10
)

// childVariable is set in children. A program that doesn't know its verb, and so does
// again what it does, starts no other.
const childVariable = "KVFERRY_MOONCAKE_CHILD"

// self is this process's program: what its name names may have been replaced since, by
// one that speaks otherwise.
const self = "/proc/self/exe"

// child is a worker in a process of its own. It ends the process when that doesn't do
// what it must in time, and nothing that it runs is over before the process is: memory
// that a call had the child write is written by nobody when the call returns.
type child struct {
	cmd      *exec.Cmd
	conn     *net.UnixConn
	patience time.Duration // for what was given up to end
	said     *tail
	name     string
	release  string

	out  chan struct{} // has one entry while a frame is sent
	room []byte        // guarded by out

	mu    sync.Mutex
	last  uint64                 // guarded by mu; number of the last call
	calls map[uint64]chan *frame // guarded by mu; that wait for an answer
	why   string                 // guarded by mu; why it was killed

	gone    chan struct{} // closed when the process has been waited for
	death   error         // set before gone is closed
	crashed bool          // set with it: nobody had killed it
}

var _ worker = (*child)(nil)

// purpose is what a child is for.
type purpose struct {
	serves bool // offers: others can reach it
	ipv6   bool // it reads from an address of that family, or offers at one
}

// startChild starts a process and has it load the library. Kinds: fault.Device (it dies,
// with what it said), fault.NotFound, fault.Unsupported, fault.Invalid.
//
// The library looks for a free port, and takes it later: when somebody else was quicker,
// which turn keeps engines of kvferry's from being, it ends its process. Then there is
// another try.
func startChild(ctx context.Context, o *Options, p purpose) (c *child, err error) {
	for range tries {
		c, err = startOnce(ctx, o, p)
		if err == nil || !strings.Contains(err.Error(), portTaken) {
			break
		}
	}
	return c, err
}

const portTaken = ": Address already in use" // of bind, or of listen

func startOnce(ctx context.Context, o *Options, p purpose) (c *child, err error) {
	if os.Getenv(childVariable) != "" {
		return nil, fault.New(fault.Unsupported, "child process", "this is one, and a child has none").
			Hint("a program that embeds kvferry calls mooncake.Serve when its argument is %s; or name kvferry: Options.Executable", Verb)
	}
	cmd := exec.CommandContext(context.Background(), o.Executable, Verb) // it outlives the call
	if o.Executable == "" {
		cmd = exec.CommandContext(context.Background(), self, Verb)
		cmd.Args[0], _ = os.Executable() // which only looks better
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fault.Wrap(fault.Device, "socket of a child", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "child"), os.NewFile(uintptr(fds[1]), "parent")
	conn, err := net.FileConn(ours)
	_ = ours.Close() // conn has a descriptor of its own
	if err != nil {
		_ = theirs.Close()
		return nil, fault.Wrap(fault.Device, "socket of a child", err)
	}
	c = &child{
		cmd:  cmd,
		conn: conn.(*net.UnixConn), //nolint:errcheck // of that family
		said: &tail{log: o.Log}, patience: o.Patience, out: make(chan struct{}, 1), calls: map[uint64]chan *frame{}, gone: make(chan struct{}),
	}
	c.cmd.Env = append(environ(os.Environ(), o, p.ipv6), childVariable+"=1")
	c.cmd.ExtraFiles, c.cmd.Stderr = []*os.File{theirs}, c.said
	c.cmd.WaitDelay = leftLimit
	// It ends with its parent, and signals from the terminal are the parent's.
	c.cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	started := make(chan error)
	go c.live(started)
	err = <-started
	_ = theirs.Close() // the child has it
	if err != nil {
		_ = conn.Close()
		return nil, fault.Wrap(fault.NotFound, "child process", err).Hint("name the kvferry executable: Options.Executable")
	}

	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	answer, err := c.call(ctx, &frame{kind: startCall, config: o.config(p.serves)}, nil)
	if err == nil {
		r := &body{rest: answer}
		if c.name, c.release = r.text(), r.text(); r.bad {
			err = fault.New(fault.Invalid, "child process", "answers with %d bytes that are none of its name", len(answer))
		}
	}
	if err != nil {
		c.end("killed: it did not start")
		return nil, err
	}
	return c, nil
}

func (c *child) named() (name, release string) { return c.name, c.release }

// live starts the process, and waits for it. The kernel kills a child with its parent when
// the thread ends that started it, whatever the rest of the parent does. So it is this
// one's as long as the child lives: others of Go's end with what embedders run on them.
func (c *child) live(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := c.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		c.kill(c.answers())
	}()
	waited := c.cmd.Wait()
	// What it had sent is there, and then the end, unless it has left its socket to another.
	_ = c.conn.SetReadDeadline(time.Now().Add(leftLimit))
	<-answered
	c.mu.Lock()
	c.death = c.obituary(waited)
	c.mu.Unlock()
	_ = c.conn.Close()
	close(c.gone)
}

// answers returns when the child has closed its end, or sends what is no answer: why it
// is killed, if it lives.
func (c *child) answers() string {
	packet := make([]byte, frameMost+1)
	for {
		// Without room for control data the kernel closes descriptors that come along.
		n, _, _, _, err := c.conn.ReadMsgUnix(packet, nil)
		if err != nil || n == 0 {
			return "" // it has ended, and says so itself
		}
		f := new(frame)
		if err := f.parse(packet[:n]); err != nil {
			return fmt.Sprintf("killed: it sent what is no frame: %v", err)
		}
		if f.kind != answerGood && f.kind != answerBad {
			return fmt.Sprintf("killed: it sent a frame of type %d, which is no answer", f.kind)
		}
		f.data = slices.Clone(f.data)
		c.mu.Lock()
		waits := c.calls[f.call]
		delete(c.calls, f.call)
		c.mu.Unlock()
		if waits != nil {
			waits <- f
		}
	}
}

// obituary says how the process ended. The caller holds mu.
func (c *child) obituary(waited error) error {
	how := "exited"
	if waited != nil {
		how = waited.Error()
	}
	status, _ := c.cmd.ProcessState.Sys().(interface {
		Signaled() bool
		Signal() unix.Signal
	})
	if c.why != "" && status != nil && status.Signaled() && status.Signal() == unix.SIGKILL {
		how = c.why
	} else {
		c.crashed = true
	}
	return fault.New(fault.Device, fmt.Sprintf("mooncake: child process %d", c.cmd.Process.Pid), "%s%s", how, c.said.lines()).
		Hint("it is started again at the next use; kvferry doctor says whether the libraries can be opened")
}

// kill ends the process, for the reason that is given first.
func (c *child) kill(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == "" {
		c.why = why
	}
	_ = c.cmd.Process.Signal(unix.SIGKILL) // of a process that has ended: then there is nothing to do
}

// end is kill, and waits until the process is no more.
func (c *child) end(why string) {
	c.kill(why)
	<-c.gone
}

// begin sends a call, unless ctx ends before that. fds go along, and stay the caller's.
func (c *child) begin(ctx context.Context, f *frame, fds []int) (answer chan *frame, err error) {
	answer = make(chan *frame, 1)
	c.mu.Lock()
	c.last++
	f.call = c.last
	c.calls[f.call] = answer
	c.mu.Unlock()
	err = c.send(ctx, f, fds)
	if err == nil {
		return answer, nil
	}
	if late := ctx.Err(); late != nil && errors.Is(err, os.ErrDeadlineExceeded) { // it was not sent
		c.mu.Lock()
		delete(c.calls, f.call)
		c.mu.Unlock()
		return nil, late
	}
	why := ""
	if !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, net.ErrClosed) {
		why = fmt.Sprintf("killed: it can't be told anything: %v", err)
	} // else it has ended, and says so itself
	c.end(why)
	return nil, c.death
}

// send sends a frame, or fails when the child takes none for too long, or ctx ends.
func (c *child) send(ctx context.Context, f *frame, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	select {
	case c.out <- struct{}{}:
	case <-ctx.Done():
		return os.ErrDeadlineExceeded
	}
	defer func() { <-c.out }()
	c.room = f.append(c.room[:0])
	if err := c.conn.SetWriteDeadline(time.Now().Add(c.patience)); err != nil { // should the child stand still
		return err
	}
	if ctx.Done() != nil {
		cut := make(chan struct{})
		stop := context.AfterFunc(ctx, func() {
			_ = c.conn.SetWriteDeadline(time.Now()) // else the one before is kept
			close(cut)
		})
		defer func() {
			if !stop() {
				<-cut // or the next frame's limit would be cut
			}
		}()
	}
	_, _, err := c.conn.WriteMsgUnix(c.room, oob, nil)
	return err
}

// result is an answer as a call returns it.
func (f *frame) result() ([]byte, error) {
	if f.kind == answerBad {
		return nil, f.fault
	}
	return f.data, nil
}

// call sends a call and waits for its answer, or until ctx ends. Then, and when the
// answer is an error that it can't go on after, the child may still be at it.
func (c *child) call(ctx context.Context, f *frame, fds []int) ([]byte, error) {
	answer, err := c.begin(ctx, f, fds)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answer:
		return a.result()
	case <-c.gone:
		return nil, c.death
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *child) add(ctx context.Context, number uint32, m *device.Memory, remote bool) (uint64, error) {
	pieces, fds, err := piecesOf(m, !remote)
	if err != nil {
		return 0, err
	}
	defer closeAll(fds)
	answer, err := c.call(ctx, &frame{kind: mapCall, number: number, write: !remote, remote: remote, bytes: m.Size(), pieces: pieces}, fds)
	return number64(answer, err)
}

// number64 is the number that an answer has.
func number64(answer []byte, err error) (uint64, error) {
	if err != nil {
		return 0, err
	}
	if len(answer) != 8 {
		return 0, fault.New(fault.Invalid, "child process", "answers with %d bytes", len(answer))
	}
	return binary.LittleEndian.Uint64(answer), nil
}

func (c *child) remove(ctx context.Context, number uint32) error {
	_, err := c.call(ctx, &frame{kind: unmapCall, number: number}, nil)
	return err
}

func (c *child) open(ctx context.Context, name string) (uint32, error) {
	n, err := number64(c.call(ctx, &frame{kind: openCall, text: name}, nil))
	return uint32(n), err
}

// ahead is how many frames of requests a read has sent ahead: the child must not wait for
// the next while it runs one.
const ahead = 2

func (c *child) read(ctx context.Context, segment uint32, requests []request) (err error) {
	var sent [ahead]sentCall
	flying := sent[:0]
	done := ctx.Done()
	var late <-chan time.Time
	f := frame{kind: readCall, number: segment}
	for {
		for len(flying) < ahead && len(requests) > 0 && err == nil {
			n := min(len(requests), frameRequests)
			f.requests, requests = requests[:n], requests[n:]
			// Whole or not at all: the end of ctx is seen below.
			answer, err := c.begin(context.Background(), &f, nil)
			if err != nil {
				return err // the process is no more
			}
			flying = append(flying, sentCall{f.call, answer})
		}
		if len(flying) == 0 {
			return err
		}
		var bad error
		select {
		case a := <-flying[0].answer:
			flying = append(flying[:0], flying[1:]...)
			_, bad = a.result()
		case <-c.gone:
			return c.death
		case <-done:
			done, bad = nil, ctx.Err()
			timer := time.NewTimer(c.patience)
			defer timer.Stop()
			late = timer.C
		case <-late:
			// Only so can this return, with nothing that writes the pages.
			c.end(fmt.Sprintf("killed: a read that was given up did not end in %v", c.patience))
			return fault.Wrap(fault.Busy, "", errors.Join(err, c.death))
		}
		if bad != nil && err == nil {
			err = bad
			for _, x := range flying { // what is in flight ends by itself, and no more begins
				if c.send(context.Background(), &frame{kind: stopCall, call: x.call}, nil) != nil {
					c.kill("killed: it can't be told to stop")
				}
			}
		}
	}
}

// sentCall is a call that waits for its answer.
type sentCall struct {
	call   uint64
	answer chan *frame
}

func (c *child) words(ctx context.Context, segment uint32, at []word, answer []byte) error {
	f := &frame{kind: wordsCall, number: segment, words: at}
	got, err := c.call(ctx, f, nil)
	if err != nil && ctx.Err() != nil {
		// The child counts what doesn't end, and would drown in what it isn't told of.
		go func() { _ = c.send(context.Background(), &frame{kind: stopCall, call: f.call}, nil) }()
	}
	if err == nil && len(got) != len(answer) {
		err = fault.New(fault.Invalid, "child process", "answers with %d bytes, and %d were asked for", len(got), len(answer))
	}
	if err == nil {
		copy(answer, got)
	}
	return err
}

// close ends the process at once: it has nothing to lose.
func (c *child) close() {
	c.end("killed: it is not needed any more")
}

// tail keeps the last lines that a child writes, and logs all.
type tail struct {
	log *slog.Logger

	mu    sync.Mutex
	kept  []string // guarded by mu; at most tailLines
	line  []byte   // guarded by mu; one that is not complete
	crash bool     // guarded by mu; Go reports one, with stacks and registers to come
}

// Write implements io.Writer.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.line = append(t.line, b...)
	for {
		line, rest, whole := bytes.Cut(t.line, []byte{'\n'})
		if !whole && len(t.line) < lineBytes {
			return len(b), nil
		}
		t.keep(string(line))
		t.line = append(t.line[:0], rest...)
	}
}

func (t *tail) keep(line string) {
	t.log.LogAttrs(context.Background(), slog.LevelDebug, "mooncake child", slog.String("line", line))
	if t.crash || strings.TrimSpace(line) == "" {
		return
	}
	for _, first := range []string{"SIG", "fatal error: ", "panic: "} {
		t.crash = t.crash || strings.HasPrefix(line, first)
	}
	if len(t.kept) == tailLines {
		t.kept = append(t.kept[:0], t.kept[1:]...)
	}
	t.kept = append(t.kept, line[:min(len(line), lineBytes)])
}

// lines returns the last lines, each behind a line break, or "". The child has ended.
func (t *tail) lines() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.line) > 0 {
		t.keep(string(t.line))
		t.line = nil
	}
	if len(t.kept) == 0 {
		return ""
	}
	return "; it said last:\n" + strings.Join(t.kept, "\n")
}
