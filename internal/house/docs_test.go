package house

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
)

func TestDocs_NameOnlyWhatExists(t *testing.T) {
	names, err := ReadNames(os.DirFS(root))
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range []string{"README.md", "CHANGELOG.md", "docs/ARCHITECTURE.md", "docs/CLAIMS.md", "bench/README.md"} {
		found, err := names.CheckDoc(doc)
		if err != nil {
			t.Error(err)
		}
		for _, v := range found {
			t.Error(v)
		}
	}
}

// Package fault promises a line for each kind and reason.
func TestDocs_ListEveryKindOfErrorAndEveryReason(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for k := fault.Invalid; !strings.HasPrefix(k.Error(), "kind "); k++ {
		names = append(names, k.Error())
	}
	for r := fault.Hit + 1; r < fault.NumReasons; r++ {
		names = append(names, r.String())
	}
	for _, name := range names {
		if !strings.Contains(string(text), "\n| "+name+" |") {
			t.Errorf("docs/ARCHITECTURE.md has no row for %q", name)
		}
	}
}

func TestDocs_ListEveryRow(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	p := Kvferry()
	for _, e := range entries {
		if e.IsDir() && p.placeOf(e.Name()).row >= 0 && !strings.Contains(string(text), "`"+e.Name()+"/") {
			t.Errorf("docs/ARCHITECTURE.md does not mention the folder %s/", e.Name())
		}
	}
}

func TestCheckDoc_FindsNamesThatAreNotThere(t *testing.T) {
	tree := fstest.MapFS{
		"kv/a.go": {Data: []byte(`package kv
type Cache struct { A, B int; c int }
type Reader interface { Read() }
type List[T any] struct{}
type Name string
const One = 1
var Two, three = 2, 3
func New() {}
func (c *Cache) Page() {}
func (l *List[T]) Len() {}
`)},
		"kv/a_test.go": {Data: []byte("package kv_test\nfunc TestCache_Holds(t *testing.T) {}\nfunc FuzzCache(f *testing.F) {}\nfunc Helper() {}\n")},
		"docs/A.md":    {},
	}
	names, err := ReadNames(tree)
	if err != nil {
		t.Fatal(err)
	}
	for word, there := range map[string]bool{
		"kv.Cache": true, "kv.Cache.A": true, "kv.Cache.B": true, "kv.Cache.Page": true, "kv.Reader.Read": true,
		"kv.List.Len": true, "kv.Name": true, "kv.One": true, "kv.Two": true, "kv.New": true,
		"TestCache_Holds": true, "FuzzCache": true, "kv/a.go": true, "A.md": true, "docs/A.md": true,

		"kv.Box": false, "kv.Cache.C": false, "kv.Cache.Read": false, "kv.Page": false, "kv.Helper": false,
		"TestCache_Gone": false, "FuzzGone": false, "kv/b.go": false, "B.md": false, "a.go": false,

		// Not names of this tree.
		"errors.Is": true, "make test": true, "-race": true, "kv.cache": true, "kvferry replay": true, "Testing": true,
	} {
		t.Run(word, func(t *testing.T) {
			tree["docs/D.md"] = &fstest.MapFile{Data: []byte("one\n```\n`kv.Gone`\n```\nsays `x`, `" + word + "` and more\n")}
			found, err := names.CheckDoc("docs/D.md")
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			if !there {
				want = []string{"docs/D.md:5"}
			}
			var got []string
			for _, v := range found {
				got = append(got, fmt.Sprintf("%s:%d", v.File, v.Line))
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%v (-want +got):\n%s", found, d)
			}
		})
	}
}
