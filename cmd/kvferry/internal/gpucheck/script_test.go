package gpucheck

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/needtest"
)

// script is tools/gpucheck with stubs of what it runs.
type script struct {
	t   *testing.T
	dir string

	path bool // commands are looked for in dir first
}

// report is what the script writes.
type report struct {
	Device, Kvferry, Absent string
	Exit                    int
	Steps                   []struct {
		Step, Status, Why, Output, Log string
		Exit                           int
		Passed                         *int `json:"tests_passed"`
		Failed                         *int `json:"tests_failed"`
		Answer                         any
	}
}

func newScript(t *testing.T) *script {
	t.Helper()
	text, err := os.ReadFile("../../../../tools/gpucheck")
	if err != nil {
		t.Fatal(err)
	}
	s := &script{t: t, dir: t.TempDir()}
	s.put("gpucheck", string(text))
	s.stub("kvferry", `case $1 in version) echo 'kvferry "devel"';; *) echo '{"said": "'$*'"}';; esac`)
	for _, name := range []string{"gpu.test", "kv.test", "kvferry.test"} {
		s.stub(name, `echo "--- PASS: TestA (0.00s)"; echo "    --- SKIP: TestA/b (0.00s)"; echo "    a_test.go:7: on $KVFERRY_GPU"`)
	}
	return s
}

func (s *script) stub(name, body string) { s.put(name, "#!/bin/sh\n"+body+"\n") }

func (s *script) put(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o755); err != nil {
		s.t.Fatal(err)
	}
}

// run runs the script, which must write a document of 13 steps.
func (s *script) run(library string, args ...string) (r report) {
	s.t.Helper()
	bash, err := exec.LookPath("bash")
	if err != nil {
		needtest.Missing(s.t, err)
	}
	cmd := exec.CommandContext(s.t.Context(), bash, append([]string{filepath.Join(s.dir, "gpucheck")}, args...)...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "KVFERRY_") })
	if library != "" {
		cmd.Env = append(cmd.Env, "KVFERRY_CUDA_LIBRARY="+library)
	}
	if s.path {
		cmd.Env = append(cmd.Env, "PATH="+s.dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	code := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		code = exit.ExitCode()
	} else if err != nil {
		s.t.Fatal(err)
	}
	if err := json.Unmarshal(out, &r); err != nil {
		s.t.Fatalf("%v: %s\n%s", err, out, &said)
	}
	if r.Exit != code || len(r.Steps) != 13 {
		s.t.Errorf("%d steps, exit status %d, %d said", len(r.Steps), code, r.Exit)
	}
	return r
}

// hidden hides what this machine has of NVIDIA's.
func hidden() bool {
	for _, f := range []string{"/dev/nvidiactl", "/dev/dxg"} {
		if _, err := os.Stat(f); err == nil {
			return false
		}
	}
	return true
}

func TestScript_WithoutADeviceEveryStepSaysSo(t *testing.T) {
	if !hidden() {
		t.Skip("this machine has a device")
	}
	r := newScript(t).run("")
	if r.Exit != 3 || r.Device != "cuda:0" || r.Kvferry != `kvferry "devel"` || !strings.Contains(r.Absent, "/dev/nvidiactl") {
		t.Errorf("%+v", r)
	}
	for _, x := range r.Steps {
		if x.Status != "no device" {
			t.Errorf("%+v", x)
		}
	}
	if r = newScript(t).run("", "toaster"); r.Exit != 3 || !strings.Contains(r.Absent, "toaster is no accelerator") {
		t.Errorf("%+v", r)
	}
}

func TestScript_KeepsAnswersAndFailures(t *testing.T) {
	s := newScript(t)
	r := s.run("stub", "cuda:1")
	if r.Exit != 0 || r.Absent != "" {
		t.Errorf("%+v", r)
	}
	for _, x := range r.Steps {
		tests := x.Passed != nil
		if x.Status != "passed" || (x.Answer == nil) != tests || tests && (*x.Passed != 1 || !strings.Contains(x.Log, "on cuda:1")) {
			t.Errorf("%+v", x)
		}
		if !tests && x.Step != "doctor" && !strings.Contains(fmt.Sprint(x.Answer), "--device cuda:1") {
			t.Errorf("%s was not on the device: %v", x.Step, x.Answer)
		}
	}
	s.stub("kv.test", "echo \"--- FAIL: TestB\t(0.00s)\"; echo 'C:\\ \"said\"'; exit 1")
	s.stub("kvferry", `echo 'kvferry: error: broken' >&2; exit 4`)
	r = s.run("stub")
	for _, x := range r.Steps {
		switch {
		case x.Passed == nil:
			if x.Status != "failed" || x.Exit != 4 || !strings.Contains(x.Output, "error: broken") {
				t.Errorf("%+v", x)
			}
		case x.Step == "rows":
			if x.Status != "failed" || *x.Failed != 1 || !strings.Contains(x.Output, `C:\ "said"`) {
				t.Errorf("%+v", x)
			}
		case x.Status != "passed":
			t.Errorf("%+v", x)
		}
	}
	if r.Exit != 1 {
		t.Errorf("exit status %d", r.Exit)
	}
}

func TestScript_RunsNoStepThatDoesNotFit(t *testing.T) {
	r := newScript(t).run("stub", "cuda:0", "0")
	for _, x := range r.Steps {
		if x.Status != "not run" || x.Why == "" {
			t.Errorf("%+v", x)
		}
	}
	if r.Exit != 2 {
		t.Errorf("exit status %d", r.Exit)
	}
}

// A step that the end of all cuts off has not failed, unless a part of it has.
func TestScript_CallsNoStepFailedThatHadNoTime(t *testing.T) {
	for output, want := range map[string]struct {
		status string
		exit   int
	}{
		"--- PASS: TestA (0.00s)": {"not run", 2},
		"--- FAIL: TestA (0.00s)": {"timed out", 1},
	} {
		s := newScript(t)
		s.stub("timeout", fmt.Sprintf("echo '%s'; exit 124", output)) // every step takes too long
		s.path = true
		r := s.run("stub", "cuda:0", "20") // less than the limit of any step
		for _, x := range r.Steps {
			if x.Status != want.status || (x.Why == "") != (want.status == "timed out") {
				t.Errorf("%+v", x)
			}
		}
		if r.Exit != want.exit {
			t.Errorf("exit status %d", r.Exit)
		}
		// With all the time there is it is the step's own fault.
		if r = s.run("stub", "cuda:0"); r.Exit != 1 || r.Steps[0].Status != "timed out" {
			t.Errorf("exit status %d: %+v", r.Exit, r.Steps[0])
		}
	}
}

// What shows that bytes are right does not wait for what measures.
func TestScript_MeasuresLast(t *testing.T) {
	var order []string
	for _, x := range newScript(t).run("stub").Steps {
		order = append(order, x.Step)
	}
	for _, last := range []string{"bench-copy", "replay-llama", "replay-long"} {
		if at := slices.Index(order, last); at < len(order)-3 {
			t.Errorf("%s is at %d of %v", last, at, order)
		}
	}
}
