// Package house holds the rules of the source tree that no compiler knows, and
// finds who breaks them. It reads files and never runs the go command, so `go
// test` knows what its answer depends on and does not keep an old one.
//
// # Rows
//
// Every top folder has one job and stands in one row (see [Kvferry]). The rules:
//
//   - a package imports only packages of rows below its own;
//   - inside one folder a child may import its parent, never the reverse, and
//     never its sibling; folders of commands are free in this;
//   - internal/ is open to all, and imports nothing of the rows but fault;
//   - a suite (device/devicetest, internal/leaktest) is imported only by tests and by
//     other suites;
//   - a folder with Go code that is in no row is refused.
//
// # Modules
//
// Every module that is imported is listed with the part of the tree that may
// import it: the library, the command, or tests only. What a program links that
// embeds kvferry is found by [Linked], and a test keeps the list of it. Packages of
// the standard library are the linter's business, but for C: a build without cgo
// leaves the files that import it out, and so does a linter.
//
// # Documents
//
// Names of Go code in documents are checked by [Names.CheckDoc], so that a document
// cannot name what was renamed.
//
// Trap: test files obey the same rules, but may also import the suites of their
// own folder. A test that needs more than its row belongs further up.
package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Plan is what the tree is held to.
type Plan struct {
	// Module is the path of the module.
	Module string
	// Rows are the top folders, top row first. "." is the root package.
	Rows [][]string
	// Modules says for every other module who may import it.
	Modules map[string]Scope
}

// Scope is the part of the tree that may import a module.
type Scope uint8

// The scopes, from the widest.
const (
	Library Scope = iota + 1
	Command       // folder cmd
	Tests         // test files and suites
)

// Kvferry is the plan of this repository. Folders that are not made yet have
// their row already.
func Kvferry() Plan {
	return Plan{
		Module: "github.com/kvferry/kvferry",
		Rows: [][]string{
			{"cmd"},
			{"server", "client"},
			{"."},
			{"store"},
			{"transfer", "hostpool"},
			{"copier"},
			{"kv", "prefix", "evict", "wire"},
			{"page", "device"},
			{"fault"},
		},
		Modules: map[string]Scope{
			"golang.org/x/sys":             Library,
			"github.com/zeebo/xxh3":        Library,
			"github.com/ebitengine/purego": Library, // not of the root package: see weight_test.go

			"github.com/spf13/cobra":           Command,
			"github.com/spf13/pflag":           Command,
			"github.com/pelletier/go-toml/v2":  Command,
			"github.com/guptarohit/asciigraph": Command,
			"github.com/vbauerster/mpb/v8":     Command,
			"golang.org/x/term":                Command,

			"github.com/cockroachdb/datadriven": Tests,
			"github.com/google/go-cmp":          Tests,
			"github.com/rogpeppe/go-internal":   Tests,
			"go.uber.org/goleak":                Tests,
			"pgregory.net/rapid":                Tests,
		},
	}
}

// Violation is a place that breaks a rule.
type Violation struct {
	File string // from the root of the tree
	Line int
	Rule string // what is wrong, and the rule
}

func (v Violation) String() string { return fmt.Sprintf("%s:%d: %s", v.File, v.Line, v.Rule) }

// Check reads every Go file of the tree, whatever its build constraints, and
// returns the violations in the order of the files. An error means that a file
// could not be read or parsed. Folders named testdata, hidden folders and nested
// modules are not part of the tree.
func (p Plan) Check(tree fs.FS) ([]Violation, error) {
	var found []Violation
	unknown := map[string]bool{}
	err := walk(tree, func(name string, src []byte) error {
		report := func(line int, format string, args ...any) {
			found = append(found, Violation{name, line, fmt.Sprintf(format, args...)})
		}
		from := p.place(name)
		if from.row < 0 && !unknown[from.top] {
			unknown[from.top] = true
			report(1, "folder %s is in no row: give it one, or put the code into the folder whose job it is", from.top)
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, src, parser.ImportsOnly|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			if why := p.judge(from, importPath(spec)); why != "" {
				report(set.Position(spec.Pos()).Line, "%s", why)
			}
		}
		return nil
	})
	return found, err
}

// walk calls visit for every Go file of the tree.
func walk(tree fs.FS, visit func(name string, src []byte) error) error {
	return fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := path.Base(name)
		if d.IsDir() {
			if name == "." {
				return nil
			}
			if base == "testdata" || base[0] == '.' || base[0] == '_' {
				return fs.SkipDir
			}
			if _, err := fs.Stat(tree, path.Join(name, "go.mod")); err == nil {
				return fs.SkipDir
			}
			return nil
		}
		if path.Ext(name) != ".go" {
			return nil
		}
		src, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		return visit(name, src)
	})
}

func importPath(spec *ast.ImportSpec) string {
	s, err := strconv.Unquote(spec.Path.Value)
	if err != nil {
		return spec.Path.Value // the parser has checked it
	}
	return s
}

// place is where a file or an imported package stands.
type place struct {
	dir   string // "." for the root package
	top   string // "." for the root package
	row   int    // 0 is the top row; -1: none; len(Rows): internal
	suite bool   // the package is a suite
	test  bool   // a test file, or a file of a suite
}

// place says where the file name stands.
func (p Plan) place(name string) place {
	at := p.placeOf(path.Dir(name))
	at.test = at.suite || strings.HasSuffix(name, "_test.go")
	return at
}

func (p Plan) placeOf(dir string) place {
	top, _, _ := strings.Cut(dir, "/")
	parent := path.Base(path.Dir(dir))
	at := place{dir: dir, top: top, row: -1, suite: isSuite(dir, parent)}
	if top == "internal" {
		at.row = len(p.Rows)
		return at
	}
	at.row = slices.IndexFunc(p.Rows, func(row []string) bool { return slices.Contains(row, top) })
	return at
}

// isSuite tells a folder of tests that others share: a seam's, or one below internal, as
// the fakes of vendors' libraries are.
func isSuite(dir, parent string) bool {
	base := path.Base(dir)
	return base == parent+"test" || parent == "internal" && (strings.HasSuffix(base, "test") || base == "fakedriver")
}

// judge returns the rule that an import breaks, or "".
func (p Plan) judge(from place, imported string) string {
	if imported == p.Module {
		return p.judgeOwn(from, p.placeOf("."))
	}
	if dir, own := strings.CutPrefix(imported, p.Module+"/"); own {
		return p.judgeOwn(from, p.placeOf(dir))
	}
	if imported == "C" {
		return "imports C: every build works with CGO_ENABLED=0, so libraries are opened at run time"
	}
	first, _, _ := strings.Cut(imported, "/")
	if !strings.Contains(first, ".") { // of the standard library
		return ""
	}
	switch module := p.moduleOf(imported); {
	case module == "":
		return fmt.Sprintf("imports %s, whose module is not listed: a new dependency is listed in package house, with its scope", imported)
	case p.Modules[module] == Command && from.top != "cmd":
		return fmt.Sprintf("imports %s, which is for the command: only cmd imports it", imported)
	case p.Modules[module] == Tests && !from.test:
		return fmt.Sprintf("imports %s, which is for tests: only test files and suites import it", imported)
	}
	return ""
}

func (p Plan) judgeOwn(from, to place) string {
	switch {
	case from.dir == to.dir: // an external test of the package
		return ""
	case to.suite && !from.test:
		return fmt.Sprintf("imports the suite %s: only tests and suites do", to.dir)
	case to.top == "internal":
		return ""
	case from.top == "internal":
		if to.dir == "fault" {
			return ""
		}
		return fmt.Sprintf("imports %s: internal serves every row, so it imports none but fault", to.dir)
	case from.top == to.top:
		under := from.dir != "." && strings.HasPrefix(from.dir, to.dir+"/")
		if from.top == "cmd" || under || to.suite {
			return ""
		}
		return fmt.Sprintf("imports %s: a child may import its parent, never the reverse and never its sibling", to.dir)
	case to.row < 0:
		return fmt.Sprintf("imports %s, which is in no row", to.dir)
	case from.row >= 0 && to.row <= from.row:
		return fmt.Sprintf("imports %s, which is not in a row below: the rows are %s", to.dir, p.rows())
	}
	return ""
}

// moduleOf returns the listed module that has the package, or "".
func (p Plan) moduleOf(imported string) string {
	for dir := imported; dir != "."; dir = path.Dir(dir) {
		if _, ok := p.Modules[dir]; ok {
			return dir
		}
	}
	return ""
}

// rows writes the rows for people.
func (p Plan) rows() string {
	rows := make([]string, len(p.Rows))
	for i, row := range p.Rows {
		rows[i] = strings.ReplaceAll(strings.Join(row, " "), ".", "root")
	}
	return strings.Join(rows, " | ")
}
