package transfertest

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
)

// roleVariable tells a test binary which side to be.
const roleVariable = "KVFERRY_TRANSFERTEST_ROLE"

// Child is called first in TestMain. In a process that the suite has started it is that
// side, and ends the process; elsewhere it does nothing. sides are by [Harness].Role.
func Child(sides map[string]func() (Side, error)) {
	role, ok := os.LookupEnv(roleVariable)
	if !ok {
		return
	}
	status := 0
	if err := serve(sides[role]); err != nil {
		fmt.Fprintf(os.Stderr, "transfertest: process of role %q: %v\n", role, err)
		status = 1
	}
	os.Exit(status) //nolint:forbidigo // the process is the suite's
}

// request is a call of [Owner], or of a reader.
type request struct {
	Do         string
	Descriptor []byte // of a reader; an owner's has its geometry only
	Geometry   []byte // a descriptor that has the reader's
	Seed       uint64
	Pages      []page.ID
	Local      []page.ID
	Sums       bool
	TTL        time.Duration
	Epoch      transfer.Epoch
	Start, End int
}

type reply struct {
	Kind  fault.Kind
	Err   string
	Bytes []byte
	Pages []page.ID
	N     int
}

// serve answers requests on descriptor 3 until the other side closes it.
func serve(side func() (Side, error)) error {
	if side == nil {
		return errors.New("there is no such role")
	}
	f := os.NewFile(3, "suite")
	conn, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	var w worker
	in, out := gob.NewDecoder(conn), gob.NewEncoder(conn)
	for {
		var q request
		if err := in.Decode(&q); err != nil { // the suite has closed it, or has died
			return w.close()
		}
		var a reply
		if err := w.do(side, &q, &a); err != nil {
			a.Err, a.Kind = err.Error(), fault.KindOf(err)
		}
		if err := out.Encode(a); err != nil {
			return errors.Join(err, w.close())
		}
	}
}

// worker is the side of a process: an owner or a reader.
type worker struct {
	owner *Served
}

func (w *worker) close() error {
	if w.owner == nil {
		return nil
	}
	return w.owner.Close()
}

func (w *worker) do(make func() (Side, error), q *request, a *reply) (err error) {
	switch q.Do {
	case "own":
		d, err := transfer.Decode(q.Geometry)
		if err != nil {
			return err
		}
		side, err := make()
		if err != nil {
			return err
		}
		w.owner, err = Serve(side, d.Geometry, q.Seed)
		return err
	case "read":
		side, err := make()
		if err != nil {
			return err
		}
		return readForEver(side, q)
	}
	if w.owner == nil {
		return fmt.Errorf("%q of no owner", q.Do)
	}
	switch q.Do {
	case "publish":
		a.Bytes, err = w.owner.Publish(q.Pages, q.Sums, q.TTL)
	case "end":
		err = w.owner.End(q.Epoch)
	case "leased":
		a.N, err = w.owner.Leased()
	case "drop":
		err = w.owner.Drop(q.Pages)
	case "reuse":
		a.Pages, err = w.owner.Reuse(q.Seed)
	case "free":
		a.N, err = w.owner.Free()
	case "stop":
		err = w.owner.Stop()
	default:
		err = fmt.Errorf("no such call: %q", q.Do)
	}
	return err
}

// readForEver starts a read that stays in the middle of its copy, and returns when it
// has got there: the process is to be killed.
func readForEver(side Side, q *request) error {
	geometry, err := transfer.Decode(q.Geometry)
	if err != nil {
		return err
	}
	d, err := transfer.Decode(q.Descriptor)
	if err != nil {
		return err
	}
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		return err
	}
	x, err := newGround(side, host, geometry.Geometry)
	if err != nil {
		return err
	}
	middle := make(chan struct{})
	r, err := transfer.NewReader(transfer.Options{
		Cache: x.cache, Device: x.dev, Copier: side.Copier, Host: host,
		Engines: []transfer.Engine{&stuck{side.Engine, middle}}, Deadline: time.Hour,
	})
	if err != nil {
		return err
	}
	t := r.StartRetrieve(context.Background(), q.Start, q.End, q.Local, q.Pages, d)
	over := make(chan error, 1)
	go func() { over <- t.Wait(context.Background()) }()
	select {
	case <-middle:
		return nil
	case err := <-over:
		return fmt.Errorf("the read never came to its copy: %w", orNone(err))
	}
}

// stuck is an engine whose copies copy, and never return.
type stuck struct {
	transfer.Engine
	middle chan<- struct{}
}

func (e *stuck) Open(ctx context.Context, t transfer.Target, d *transfer.Descriptor, offer []byte) (transfer.Source, error) {
	s, err := e.Engine.Open(ctx, t, d, offer)
	if err != nil {
		return nil, err
	}
	return &stuckSource{s, e.middle}, nil
}

type stuckSource struct {
	transfer.Source
	middle chan<- struct{}
}

func (s *stuckSource) Copy(ctx context.Context, on device.Stream, p *transfer.Plan) error {
	if err := s.Source.Copy(ctx, on, p); err != nil {
		return err
	}
	close(s.middle)
	select {}
}

// process is a side in another process. As an [Owner] it answers as its [Served] does.
type process struct {
	cmd  *exec.Cmd
	conn net.Conn
	gone bool // killed and waited for

	mu  sync.Mutex
	out *gob.Encoder // guarded by mu, as is in
	in  *gob.Decoder
}

var _ Owner = (*process)(nil)

// startProcess starts this test binary in that role.
func startProcess(role string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "suite"), os.NewFile(uintptr(fds[1]), "process")
	conn, err := net.FileConn(ours)
	if err := errors.Join(err, ours.Close()); err != nil {
		return nil, errors.Join(err, theirs.Close())
	}
	p := &process{cmd: exec.CommandContext(context.Background(), exe), conn: conn, out: gob.NewEncoder(conn), in: gob.NewDecoder(conn)}
	// The race detector has a process wait for a second at its end, unless it is told.
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role, "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	p.cmd.ExtraFiles, p.cmd.Stderr = []*os.File{theirs}, os.Stderr
	if err := errors.Join(p.cmd.Start(), theirs.Close()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return p, nil
}

// startOwner starts an owner of a cache of that geometry, filled by seed.
func startOwner(role string, g *kv.Geometry, seed uint64) (*process, error) {
	b, err := (&transfer.Descriptor{Geometry: g}).AppendBinary(nil)
	if err != nil {
		return nil, err
	}
	p, err := startProcess(role)
	if err != nil {
		return nil, err
	}
	if _, err := p.call(request{Do: "own", Geometry: b, Seed: seed}); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (p *process) call(q request) (a reply, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return a, err
	}
	if err := p.out.Encode(q); err != nil {
		return a, err
	}
	if err := p.in.Decode(&a); err != nil {
		return a, fmt.Errorf("%s in process %d: %w", q.Do, p.cmd.Process.Pid, err)
	}
	switch {
	case a.Kind != 0:
		return a, fault.New(a.Kind, q.Do+" in another process", "%s", a.Err)
	case a.Err != "":
		return a, errors.New(a.Err)
	}
	return a, nil
}

func (p *process) Publish(pages []page.ID, sums bool, ttl time.Duration) ([]byte, error) {
	a, err := p.call(request{Do: "publish", Pages: pages, Sums: sums, TTL: ttl})
	return a.Bytes, err
}

func (p *process) End(e transfer.Epoch) error {
	_, err := p.call(request{Do: "end", Epoch: e})
	return err
}

func (p *process) Leased() (int, error) {
	a, err := p.call(request{Do: "leased"})
	return a.N, err
}

func (p *process) Drop(pages []page.ID) error {
	_, err := p.call(request{Do: "drop", Pages: pages})
	return err
}

func (p *process) Reuse(seed uint64) ([]page.ID, error) {
	a, err := p.call(request{Do: "reuse", Seed: seed})
	return a.Pages, err
}

func (p *process) Free() (int, error) {
	a, err := p.call(request{Do: "free"})
	return a.N, err
}

func (p *process) Stop() error {
	_, err := p.call(request{Do: "stop"})
	return err
}

// signal sends a signal. After SIGKILL the process is no more when it returns.
func (p *process) signal(s unix.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil || s != unix.SIGKILL {
		return err
	}
	p.gone = true
	_ = p.cmd.Wait() // says that it was killed
	return p.conn.Close()
}

// Close has the process close its side, and end.
func (p *process) Close() error {
	if p.gone {
		return nil
	}
	p.gone = true
	err := p.conn.Close()
	kill := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() })
	defer kill.Stop()
	return errors.Join(err, p.cmd.Wait())
}
