package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/fault"
)

// ownerProcess is the child that owns the pages.
type ownerProcess struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *json.Decoder
	said    bytes.Buffer // on its standard error; to be read once it has ended
	ended   func() error // waits for its end, and says how it was
}

// startOwner starts the child, with as many threads as this side has.
func startOwner(ctx context.Context, o Options) (*ownerProcess, error) {
	command := o.Owner
	if len(command) == 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, fault.Wrap(fault.Unsupported, "this program's own file", err)
		}
		command = []string{self, "bench", TransferOwner}
	}
	p := &ownerProcess{cmd: exec.CommandContext(ctx, command[0], command[1:]...)}
	p.cmd.Stderr = &p.said
	p.cmd.Env = append(os.Environ(), "GOMAXPROCS="+strconv.Itoa(o.Threads))
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.in, p.answers = in, json.NewDecoder(out)
	if err := p.cmd.Start(); err != nil {
		return nil, fault.Wrap(fault.Unsupported, "owner of the pages", err).Hint("%s must be a file that can be run", command[0])
	}
	p.ended = sync.OnceValue(func() error {
		_ = p.in.Close() // it ends when nothing more comes
		return p.cmd.Wait()
	})
	return p, nil
}

// ask has the owner make and publish the pages of a shape.
func (p *ownerProcess) ask(ctx context.Context, q ownerRequest) (*ownerAnswer, error) {
	a := &ownerAnswer{}
	err := json.NewEncoder(p.in).Encode(q)
	if err == nil {
		err = p.answers.Decode(a)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fault.New(fault.Device, "owner of the pages", "%v", errors.Join(err, p.close())).
			Hint("run the command again, and report it if that happens twice")
	case a.Error == "" && len(a.Published) != len(q.Engines):
		return nil, fault.New(fault.Invalid, "owner of the pages", "answered for %d of %d engines", len(a.Published), len(q.Engines))
	}
	return a, a.err()
}

// close ends the child, and waits for it. Closing again says the same.
func (p *ownerProcess) close() error {
	err := p.ended()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return fault.New(fault.Device, "owner of the pages", "%v: %s", exit, strings.TrimSpace(p.said.String()))
	}
	return err
}

// keyFile is a key of this bench's own.
type keyFile struct{ dir, path string }

func makeKey() (*keyFile, error) {
	dir, err := os.MkdirTemp("", "kvferry-bench-")
	if err != nil {
		return nil, err
	}
	k := &keyFile{dir: dir, path: filepath.Join(dir, "key")}
	if err := engines.NewKeyFile(k.path); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return k, nil
}

func (k *keyFile) close() error { return os.RemoveAll(k.dir) }
