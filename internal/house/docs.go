package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"regexp"
	"strings"
)

// Names are the names that documents may use of a tree.
type Names struct {
	tree     fs.FS
	packages map[string]bool // by last element of the path
	symbols  map[string]bool // kv.Cache, kv.Cache.Page, kv.Box.Width
	tests    map[string]bool // TestX, FuzzX, BenchmarkX, ExampleX
}

var (
	fence    = regexp.MustCompile("(?ms)^```.*?^```$")
	quoted   = regexp.MustCompile("`([^`\n]+)`")
	testName = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)[A-Z_]\w*$`)
	symbol   = regexp.MustCompile(`^([a-z]\w*)\.[A-Z]\w*(\.[A-Z]\w*)?$`)
	fileName = regexp.MustCompile(`^[\w./-]*\w\.(go|md|mod)$`)
)

// ReadNames collects the names of a tree.
func ReadNames(tree fs.FS) (*Names, error) {
	n := &Names{tree: tree, packages: map[string]bool{}, symbols: map[string]bool{}, tests: map[string]bool{}}
	err := walk(tree, func(name string, src []byte) error {
		file, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		test := strings.HasSuffix(name, "_test.go")
		if !test {
			n.packages[file.Name.Name] = true
		}
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				switch {
				case test && d.Recv == nil:
					n.tests[d.Name.Name] = true
				case !test && d.Recv != nil:
					n.symbols[file.Name.Name+"."+receiver(d.Recv.List[0].Type)+"."+d.Name.Name] = true
				case !test:
					n.symbols[file.Name.Name+"."+d.Name.Name] = true
				}
			case *ast.GenDecl:
				if !test {
					n.declare(file.Name.Name, d)
				}
			}
		}
		return nil
	})
	return n, err
}

func receiver(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return ""
}

// declare notes types with their fields and methods, constants and variables.
func (n *Names) declare(pkg string, d *ast.GenDecl) {
	for _, spec := range d.Specs {
		switch spec := spec.(type) {
		case *ast.ValueSpec:
			for _, id := range spec.Names {
				n.symbols[pkg+"."+id.Name] = true
			}
		case *ast.TypeSpec:
			name := pkg + "." + spec.Name.Name
			n.symbols[name] = true
			var members *ast.FieldList
			switch t := spec.Type.(type) {
			case *ast.StructType:
				members = t.Fields
			case *ast.InterfaceType:
				members = t.Methods
			default:
				continue
			}
			for _, f := range members.List {
				for _, id := range f.Names {
					n.symbols[name+"."+id.Name] = true
				}
			}
		}
	}
}

// CheckDoc returns the names in backquotes of a document, outside of code blocks,
// that the tree does not have: tests (TestX), files (kv/doc.go) and exported
// symbols of its packages (kv.Cache.Page). Other words in backquotes pass.
func (n *Names) CheckDoc(name string) ([]Violation, error) {
	text, err := fs.ReadFile(n.tree, name)
	if err != nil {
		return nil, err
	}
	// Blocks become as many blank lines, so that lines keep their numbers.
	prose := fence.ReplaceAllStringFunc(string(text), func(s string) string { return strings.Repeat("\n", strings.Count(s, "\n")) })
	var found []Violation
	line := 0
	for s := range strings.Lines(prose) {
		line++
		for _, m := range quoted.FindAllStringSubmatch(s, -1) {
			if why := n.missing(m[1], path.Dir(name)); why != "" {
				found = append(found, Violation{name, line, why})
			}
		}
	}
	return found, nil
}

func (n *Names) missing(word, dir string) string {
	switch {
	case testName.MatchString(word):
		if !n.tests[word] {
			return fmt.Sprintf("names the test %s, which does not exist", word)
		}
	case fileName.MatchString(word):
		for _, at := range []string{word, path.Join(dir, word)} {
			if _, err := fs.Stat(n.tree, at); err == nil {
				return ""
			}
		}
		return fmt.Sprintf("names the file %s, which does not exist", word)
	default:
		if m := symbol.FindStringSubmatch(word); m != nil && n.packages[m[1]] && !n.symbols[word] {
			return fmt.Sprintf("names %s, which does not exist", word)
		}
	}
	return ""
}
