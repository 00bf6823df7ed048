package hostipc

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// childVariable tells a process of these tests to own a cache, and which.
const childVariable = "KVFERRY_TEST_HOSTIPC_CHILD"

// childSpec is a cache in page-major order, with all its pages published for an hour.
type childSpec struct {
	Kind, Dir string
	Config    kv.Config
}

const childSeed = 77

// child is an owner until its standard input ends.
func child() {
	text, ok := os.LookupEnv(childVariable)
	if !ok {
		return
	}
	status := 0
	if err := own([]byte(text)); err != nil {
		fmt.Fprintln(os.Stderr, "owner:", err)
		status = 1
	}
	os.Exit(status) //nolint:forbidigo // the process is the test's
}

func own(text []byte) (err error) {
	var spec childSpec
	if err := json.Unmarshal(text, &spec); err != nil {
		return err
	}
	g, err := spec.Config.PageMajor()
	if err != nil {
		return err
	}
	s, err := side(spec.Kind, spec.Dir)
	if err != nil {
		return err
	}
	owner, err := transfertest.Serve(s, g, childSeed)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, owner.Close()) }()
	var all []page.ID
	for id := range page.ID(g.Pages()) {
		all = append(all, id)
	}
	d, err := owner.Publish(all, false, 10*time.Minute)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintln(os.Stdout, hex.EncodeToString(d))
	_, _ = bufio.NewReader(os.Stdin).ReadByte() // until the test ends it
	return nil
}

// owner is an owner in another process.
type owner struct {
	*exec.Cmd
	d *transfer.Descriptor
}

// offer is what hostipc finds the owner by.
func (o *owner) offer() []byte { return o.d.Offers[0].Data }

// start starts an owner, and ends it with the test.
func start(t testing.TB, spec childSpec) *owner {
	t.Helper()
	text, err := json.Marshal(spec)
	noError(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	noError(t, err)
	out, err := cmd.StdoutPipe()
	noError(t, err)
	noError(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait() // killed, maybe
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	noError(t, err)
	return &owner{cmd, must(transfer.Decode(must(hex.DecodeString(strings.TrimSpace(line)))(t)))(t)}
}
