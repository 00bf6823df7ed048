package cuda_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What the documentation of the vendors' packages names is declared there, where go doc
// shows it, and no user is sent to a package that he can't read.
func TestDoc_NamesWhatGoDocShows(t *testing.T) {
	for _, dir := range []string{".", "../hip"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		declared, text := map[string]bool{}, ""
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range f.Comments {
				text += c.Text()
			}
			for _, d := range f.Decls {
				if m, ok := d.(*ast.FuncDecl); ok && m.Recv != nil && m.Doc != nil {
					if p, ok := m.Recv.List[0].Type.(*ast.StarExpr); ok {
						declared[p.X.(*ast.Ident).Name+"."+m.Name.Name] = true
					}
				}
			}
		}
		named := regexp.MustCompile(`\[(Driver\.\w+)\]`).FindAllStringSubmatch(text, -1)
		if len(named) < 8 {
			t.Errorf("%s: %d methods are named", dir, len(named))
		}
		for _, n := range named {
			if !declared[n[1]] {
				t.Errorf("%s: %s is not declared, or not documented", dir, n[1])
			}
		}
		if strings.Contains(text, "internal/") {
			t.Errorf("%s: a comment sends its reader to an internal package", dir)
		}
	}
}
