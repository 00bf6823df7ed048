package house

import (
	"fmt"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const root = "../.." // of the repository

func TestCheck_TheTreeKeepsTheRules(t *testing.T) {
	found, err := Kvferry().Check(os.DirFS(root))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range found {
		t.Error(v)
	}
}

func TestCheck_EveryListedModuleIsInUse(t *testing.T) {
	p := Kvferry()
	unused := maps.Clone(p.Modules)
	err := walk(os.DirFS(root), func(name string, src []byte) error {
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range f.Imports {
			delete(unused, p.moduleOf(importPath(spec)))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for m := range unused {
		t.Errorf("%s is listed, and nothing imports it: take it off the list and out of go.mod", m)
	}
}

func TestKvferry_EveryFolderIsInOneRow(t *testing.T) {
	seen := map[string]int{}
	for i, row := range Kvferry().Rows {
		for _, folder := range row {
			if j, twice := seen[folder]; twice {
				t.Errorf("%s is in rows %d and %d", folder, j, i)
			}
			seen[folder] = i
		}
	}
}

// plan is a small house for the negative controls.
func plan() Plan {
	return Plan{
		Module: "example.org/h",
		Rows:   [][]string{{"cmd"}, {"."}, {"attic", "loft"}, {"floor"}, {"fault"}},
		Modules: map[string]Scope{
			"example.com/lib": Library, "example.com/flags": Command, "example.com/rapid/v2": Tests,
		},
	}
}

func file(imports ...string) *fstest.MapFile {
	src := "package x\n\nimport (\n"
	for _, i := range imports {
		src += fmt.Sprintf("\t%q\n", i)
	}
	return &fstest.MapFile{Data: []byte(src + ")\n")}
}

func TestCheck_FindsWhatBreaksARule(t *testing.T) {
	const h = "example.org/h"
	for _, tc := range []struct {
		name    string
		file    string
		imports []string
		want    string // of the violation; "" when there is none
	}{
		{"below", "attic/a.go", []string{"fmt", h + "/floor", h + "/fault"}, ""},
		{"root below", "a.go", []string{h + "/attic", h + "/floor"}, ""},
		{"command", "cmd/c/a.go", []string{h, h + "/attic", h + "/cmd/c/internal/d"}, ""},
		{"upward", "floor/a.go", []string{"fmt", h + "/attic"}, "floor/a.go:5: imports attic, which is not in a row below: the rows are cmd | root | attic loft | floor | fault"},
		{"upward to the root", "attic/a.go", []string{h}, "attic/a.go:4: imports ., which is not in a row below: "},
		{"upward from a child", "floor/tile/a.go", []string{h + "/attic"}, "floor/tile/a.go:4: imports attic, which is not in a row below: "},
		{"upward to a child", "floor/a.go", []string{h + "/attic/chest"}, "floor/a.go:4: imports attic/chest, which is not in a row below: "},
		{"upward in a test", "floor/a_test.go", []string{h + "/attic"}, "floor/a_test.go:4: imports attic, which is not in a row below: "},
		{"the command from below", "a.go", []string{h + "/cmd/c"}, "a.go:4: imports cmd/c, which is not in a row below: "},
		{"sideways", "attic/a.go", []string{h + "/loft"}, "attic/a.go:4: imports loft, which is not in a row below: "},

		{"child to parent", "attic/chest/a.go", []string{h + "/attic"}, ""},
		{"grandchild to parent", "attic/chest/box/a.go", []string{h + "/attic", h + "/attic/chest"}, ""},
		{"parent to child", "attic/a.go", []string{h + "/attic/chest"}, "attic/a.go:4: imports attic/chest: a child may import its parent, "},
		{"parent to child in a test", "attic/a_test.go", []string{h + "/attic/chest"}, "attic/a_test.go:4: imports attic/chest: a child may import its parent, "},
		{"sibling", "attic/chest/a.go", []string{h + "/attic/box"}, "attic/chest/a.go:4: imports attic/box: a child may import its parent, "},
		{"name that only begins alike", "attic/a.go", []string{h + "/atticus"}, "attic/a.go:4: imports atticus, which is in no row"},
		{"a package's own external test", "attic/a_test.go", []string{h + "/attic"}, ""},

		{"suite in a test", "attic/a_test.go", []string{h + "/attic/attictest"}, ""},
		{"suite in a sibling's test", "attic/chest/a_test.go", []string{h + "/attic/attictest"}, ""},
		{"suite in a suite", "attic/attictest/a.go", []string{h + "/attic", h + "/floor/floortest"}, ""},
		{"suite below internal in a test", "attic/a_test.go", []string{h + "/internal/leaktest"}, ""},
		{"suite below internal in the product", "attic/a.go", []string{h + "/internal/leaktest"}, "attic/a.go:4: imports the suite internal/leaktest: only tests and suites do"},
		{"fakes in the product", "attic/a.go", []string{h + "/internal/fakedriver"}, "attic/a.go:4: imports the suite internal/fakedriver: only tests and suites do"},
		{"suite in the product", "attic/a.go", []string{h + "/floor/floortest"}, "attic/a.go:4: imports the suite floor/floortest: only tests and suites do"},
		{"own suite in the product", "attic/a.go", []string{h + "/attic/attictest"}, "attic/a.go:4: imports the suite attic/attictest: only tests and suites do"},

		{"internal from all", "fault/a.go", []string{h + "/internal/i"}, ""},
		{"internal to fault and internal", "internal/i/a.go", []string{h + "/fault", h + "/internal/j"}, ""},
		{"internal to a row", "internal/i/a.go", []string{h + "/floor"}, "internal/i/a.go:4: imports floor: internal serves every row, so it imports none but fault"},
		{"internal to the root", "internal/i/a_test.go", []string{h}, "internal/i/a_test.go:4: imports .: internal serves every row, "},

		{"unknown folder", "cellar/a.go", []string{h + "/fault"}, "cellar/a.go:1: folder cellar is in no row: "},
		{"unknown folder, only tests", "cellar/deep/a_test.go", nil, "cellar/deep/a_test.go:1: folder cellar is in no row: "},

		{"module", "floor/a.go", []string{"example.com/lib", "example.com/lib/sub"}, ""},
		{"unknown module", "floor/a.go", []string{"example.com/library"}, "floor/a.go:4: imports example.com/library, whose module is not listed: "},
		{"unknown module in a test", "floor/a_test.go", []string{"example.com/testify/assert"}, "floor/a_test.go:4: imports example.com/testify/assert, whose module is not listed: "},
		{"module of tests in a test", "floor/a_test.go", []string{"example.com/rapid/v2"}, ""},
		{"module of tests in a suite", "floor/floortest/a.go", []string{"example.com/rapid/v2/x"}, ""},
		{"module of tests in the product", "floor/a.go", []string{"example.com/rapid/v2"}, "floor/a.go:4: imports example.com/rapid/v2, which is for tests: "},
		{"module of tests in the command", "cmd/c/a.go", []string{"example.com/rapid/v2"}, "cmd/c/a.go:4: imports example.com/rapid/v2, which is for tests: "},
		{"module of the command in the command", "cmd/c/a.go", []string{"example.com/flags"}, ""},
		{"module of the command in the library", "a.go", []string{"example.com/flags"}, "a.go:4: imports example.com/flags, which is for the command: "},

		{"standard package", "floor/a.go", []string{"log/slog"}, ""},
		{"cgo", "floor/a.go", []string{"C"}, "floor/a.go:4: imports C: every build works with CGO_ENABLED=0"},
		{"cgo in a test", "floor/a_test.go", []string{"C"}, "floor/a_test.go:4: imports C: "},

		{"not of the tree", "attic/testdata/a.go", []string{h + "/loft"}, ""},
		{"hidden", "attic/.old/a.go", []string{h + "/loft"}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			found, err := plan().Check(fstest.MapFS{tc.file: file(tc.imports...), "README.md": {}})
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case tc.want == "" && len(found) == 0:
			case tc.want != "" && len(found) == 1 && strings.HasPrefix(found[0].String(), tc.want):
			default:
				t.Errorf("got %v, want one that begins with %q", found, tc.want)
			}
		})
	}
}

func TestCheck_ReportsEveryViolationInOrder(t *testing.T) {
	const h = "example.org/h"
	tree := fstest.MapFS{
		"attic/a.go":      file(h+"/loft", h+"/floor", "C"),
		"cellar/a.go":     file(),
		"cellar/b.go":     file(), // the folder is reported once
		"tools/a.go":      file("example.com/anything"),
		"tools/go.mod":    {}, // a module of its own
		"floor/tile/a.go": file(h + "/loft"),
	}
	found, err := plan().Check(tree)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, v := range found {
		got = append(got, fmt.Sprintf("%s:%d", v.File, v.Line))
	}
	if d := cmp.Diff([]string{"attic/a.go:4", "attic/a.go:6", "cellar/a.go:1", "floor/tile/a.go:4"}, got); d != "" {
		t.Errorf("violations (-want +got):\n%s", d)
	}
}

func TestCheck_SaysWhichFileCannotBeParsed(t *testing.T) {
	_, err := plan().Check(fstest.MapFS{"floor/a.go": {Data: []byte("package\n")}})
	if err == nil || !strings.HasPrefix(err.Error(), "floor/a.go:") {
		t.Errorf("got %v", err)
	}
}

// The rules that the rows are there for, said once more about this house.
func TestKvferry_RefusesWhatTheRowsAreThereFor(t *testing.T) {
	p := Kvferry()
	for _, tc := range []struct{ file, imports string }{
		{"page/bad.go", p.Module + "/store"},               // upward
		{"page/bad.go", p.Module + "/device"},              // sideways
		{"copier/bad.go", p.Module},                        // the library's front door
		{"device/bad.go", p.Module + "/device/devicetest"}, // a suite in the product
		{"device/bad.go", p.Module + "/device/cuda"},       // a child
		{"internal/dl/bad.go", p.Module + "/device"},       // out of internal
		{"store/bad.go", "pgregory.net/rapid"},             // a module of tests
		{"store/bad.go", "github.com/spf13/cobra"},         // a module of the command
		{"store/bad.go", "github.com/stretchr/testify"},    // a module of nobody
		{"kv/bad.go", "C"},                                 // what needs a C compiler
		{"util/bad.go", "fmt"},                             // a folder without a job
	} {
		found, err := p.Check(fstest.MapFS{tc.file: file(tc.imports)})
		if err != nil || len(found) != 1 || found[0].File != tc.file {
			t.Errorf("%s imports %s: got %v, %v", tc.file, tc.imports, found, err)
		}
	}
}
