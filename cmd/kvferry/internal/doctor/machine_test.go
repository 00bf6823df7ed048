package doctor

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write what is said of the machines in testdata into their files")

// notThere are the errors that machines of tests can meet, by name.
func errno(name string) error {
	for _, e := range []unix.Errno{unix.ENOMEM, unix.EPERM, unix.ENOSYS} {
		if unix.ErrnoName(e) == name {
			return e
		}
	}
	return errors.New(name)
}

// readMachine makes the machine of a file: its files, and in the file "calls" what no
// file says, a line each:
//
//	env NAME VALUE
//	link PATH TARGET
//	statfs PATH BYTES FREE
//	page BYTES
//	lock ERROR      (none: it works)
//	takefd ERROR    (none: it works)
func readMachine(t *testing.T, a *txtar.Archive) *Machine {
	t.Helper()
	root, env, sizes := fstest.MapFS{}, map[string]string{}, map[string][2]int64{}
	m := &Machine{Root: root, PageSize: 4096, Getenv: func(name string) string { return env[name] }}
	var lock, takeFD error
	m.Lock = func(int) error { return lock }
	m.TakeFD = func() error { return takeFD }
	m.Statfs = func(path string) (bytes, free int64, err error) {
		s, ok := sizes[path]
		if !ok {
			return 0, 0, fmt.Errorf("statfs %s: %w", path, fs.ErrNotExist)
		}
		return s[0], s[1], nil
	}
	number := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, f := range a.Files {
		switch f.Name {
		case "want":
		case "calls":
			for line := range strings.Lines(string(f.Data)) {
				w := strings.Fields(line)
				switch {
				case len(w) == 3 && w[0] == "env":
					env[w[1]] = w[2]
				case len(w) == 3 && w[0] == "link":
					root[w[1]] = &fstest.MapFile{Data: []byte(w[2]), Mode: fs.ModeSymlink}
				case len(w) == 4 && w[0] == "statfs":
					sizes[w[1]] = [2]int64{number(w[2]), number(w[3])}
				case len(w) == 2 && w[0] == "page":
					m.PageSize = number(w[1])
				case len(w) == 2 && w[0] == "lock":
					lock = errno(w[1])
				case len(w) == 2 && w[0] == "takefd":
					takeFD = fmt.Errorf("pidfd_getfd: %w", errno(w[1]))
				default:
					t.Fatalf("calls: %q", line)
				}
			}
		default:
			root[f.Name] = &fstest.MapFile{Data: f.Data}
		}
	}
	return m
}

func machines(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/machines/*.txtar")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d machines, %v", len(files), err)
	}
	return files
}

func TestExamine_SaysWhatMachinesAreLike(t *testing.T) {
	for _, file := range machines(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			sections := Examine(readMachine(t, a))
			for _, s := range sections {
				for _, f := range s.Findings {
					if f.Name == "" || f.Text == "" || (f.Level == Green) != (f.Remedy == "") {
						t.Errorf("%s: %+v: a name, a text, and a remedy unless it is green", s.Title, f)
					}
				}
			}
			var b bytes.Buffer
			writeSections(&b, sections, false)
			for i := range a.Files {
				f := &a.Files[i]
				if f.Name != "want" {
					continue
				}
				if *update {
					f.Data = b.Bytes()
					if err := os.WriteFile(file, txtar.Format(a), 0o666); err != nil {
						t.Fatal(err)
					}
				}
				if d := cmp.Diff(string(f.Data), b.String()); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
				return
			}
			t.Error("it has no file want")
		})
	}
}

// Nothing is known of an empty machine, and nothing of it may be called well that was not
// looked at.
func TestExamine_OfNothingStillSays(t *testing.T) {
	m := readMachine(t, &txtar.Archive{})
	var names []string
	for _, s := range Examine(m) {
		for _, f := range s.Findings {
			if f.Level == Yellow {
				names = append(names, f.Name)
			}
			if f.Level == Red {
				t.Errorf("%s is red: %s", f.Name, f.Text)
			}
		}
	}
	want := []string{"memory", "locking", "huge pages", "/dev/shm", "PID namespace"}
	if d := cmp.Diff(want, names); d != "" {
		t.Errorf("yellow (-want +got):\n%s", d)
	}
}

// What no driver is there for is not started: a library makes device nodes.
func TestHasCUDA_OnlyWhereTheNodeIsThere(t *testing.T) {
	for file, want := range map[string][2]bool{
		"":                        {false, false},
		"proc/driver/nvidia/gpus": {false, false},
		"dev/nvidiactl":           {true, false},
		"dev/dxg":                 {true, false},
		"dev/nvmap":               {true, false},
		"dev/kfd":                 {false, true},
	} {
		root := fstest.MapFS{}
		if file != "" {
			root[file] = &fstest.MapFile{}
		}
		m := &Machine{Root: root}
		if got := [2]bool{m.hasCUDA(), m.hasHIP()}; got != want {
			t.Errorf("%s: got %v, want %v", file, got, want)
		}
	}
}

func TestThisMachine_IsReadWithoutAnError(t *testing.T) {
	m := ThisMachine()
	for _, s := range Examine(m) {
		for _, f := range s.Findings {
			if strings.Contains(f.Text, "not known") {
				t.Errorf("%s: %s", f.Name, f.Text)
			}
		}
	}
	if _, _, err := m.Statfs("/none/of/these"); err == nil {
		t.Error("a file system that is not there has a size")
	}
}

func TestSet_ReadsWhatTheKernelWrites(t *testing.T) {
	for list, want := range map[string]map[int]bool{
		"":        {},
		"0":       {0: true},
		"0-2,7":   {0: true, 1: true, 2: true, 7: true},
		"x,1,2-y": {1: true},
		"3-1":     {},
	} {
		if d := cmp.Diff(want, set(list)); d != "" {
			t.Errorf("%q: %s", list, d)
		}
	}
	if n := len(set("0-999999999999")); n > 5000 {
		t.Errorf("a list of %d", n)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 64 << 20: "64 MiB", 25231138816: "23.5 GiB",
		999 << 30: "999 GiB", 3 << 50: "3072 TiB",
	} {
		if got := size(n); got != want {
			t.Errorf("%d: got %q, want %q", n, got, want)
		}
	}
}
