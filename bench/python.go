package main

import (
	"bufio"
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The Python rivals are scripts of python/, each a process of its own that waits
// while others run. They speak lines of JSON: a configuration in, {"ready": "torch
// 2.15.0"} or {"missing": "torch", "install": "pip install torch"} out; then for
// every "run" in, {"seconds": 0.12} out. rival.py is the Python side of it.
//
//go:embed python/*.py
var scripts embed.FS

// python starts scripts with one interpreter.
type python struct {
	path   string // of the interpreter
	folder string // where the scripts were written
}

// openPython writes the scripts to a folder of its own. An interpreter that does not
// exist is found out by start: its rivals are missing.
func openPython(path string) (*python, error) {
	folder, err := os.MkdirTemp("", "kvferry-bench-")
	if err != nil {
		return nil, err
	}
	p := &python{path: path, folder: folder}
	names, err := scripts.ReadDir("python")
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	for _, n := range names {
		b, err := scripts.ReadFile("python/" + n.Name())
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, n.Name()), b, 0o600)
		}
		if err != nil {
			return nil, errors.Join(err, p.close())
		}
	}
	return p, nil
}

func (p *python) close() error { return os.RemoveAll(p.folder) }

// answer is a line from a script.
type answer struct {
	Ready   string   `json:"ready"`
	Missing string   `json:"missing"`
	Install string   `json:"install"`
	Seconds *float64 `json:"seconds"`
	Note    string   `json:"note"`
}

// start starts a script and returns it as a rival: one that is missing if it can't
// run here. Errors are those of a script that ran and did not do its work.
func (p *python) start(ctx context.Context, name, script string, config any) (*rival, error) {
	line, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, p.path, "-u", filepath.Join(p.folder, script))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return &rival{name: name, missing: fmt.Sprintf("no Python: %v; name one with -python", err)}, nil
	}
	s := &process{cmd: cmd, in: in, out: bufio.NewScanner(out), stderr: &stderr}
	a, err := s.ask(string(line))
	switch {
	case err != nil:
		s.kill()
		return nil, fmt.Errorf("%s: %w", script, err)
	case a.Missing != "":
		return &rival{name: name, missing: fmt.Sprintf("%s is not installed: %s", a.Missing, a.Install), close: s.close}, nil
	}
	r := &rival{name: name + ", " + a.Ready, close: s.close, note: func() string { return s.note }}
	r.run = func(context.Context) (float64, error) {
		a, err := s.ask("run")
		if err != nil {
			return 0, err
		}
		if a.Seconds == nil {
			return 0, fmt.Errorf("%s answered without seconds", script)
		}
		s.note = a.Note
		return *a.Seconds, nil
	}
	return r, nil
}

// process is a script that runs.
type process struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Scanner
	stderr *bytes.Buffer
	note   string
}

// ask writes a line and reads the line that answers it.
func (s *process) ask(line string) (a answer, err error) {
	if _, err := io.WriteString(s.in, line+"\n"); err != nil {
		return a, s.died(err)
	}
	if !s.out.Scan() {
		return a, s.died(errors.Join(s.out.Err(), io.ErrUnexpectedEOF))
	}
	if err := json.Unmarshal(s.out.Bytes(), &a); err != nil {
		return a, fmt.Errorf("answered %q: %w", s.out.Text(), err)
	}
	return a, nil
}

// died adds the last line that the script wrote before it ended.
func (s *process) died(err error) error {
	s.kill()
	lines := strings.Split(strings.TrimSpace(s.stderr.String()), "\n")
	return fmt.Errorf("%w: %s", err, lines[len(lines)-1])
}

// close ends the script by ending its input.
func (s *process) close() error {
	err := s.in.Close()
	if werr := s.cmd.Wait(); err == nil {
		err = werr
	}
	return err
}

func (s *process) kill() {
	_ = s.in.Close()
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}
