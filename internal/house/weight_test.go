package house

import (
	"go/build"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// linked are the modules that a program links which imports a folder of kvferry, by
// architecture. An engine embeds the root package, and a device if it has one. A line
// more is a decision: it says what the module is for.
func linked() map[string]map[string][]string {
	const (
		cpuid  = "github.com/klauspost/cpuid/v2" // xxh3 asks it what the CPU can do
		purego = "github.com/ebitengine/purego"  // opens libraries; makes a program dynamic
		xxh3   = "github.com/zeebo/xxh3"         // checksums of pages
		sys    = "golang.org/x/sys"              // memfds, mappings, advice to the kernel
	)
	return map[string]map[string][]string{
		".":           {"amd64": {cpuid, xxh3, sys}, "arm64": {xxh3, sys}},
		"device/cuda": {"amd64": {purego, cpuid, xxh3, sys}, "arm64": {purego, xxh3, sys}},
		"device/hip":  {"amd64": {purego, cpuid, xxh3, sys}, "arm64": {purego, xxh3, sys}},
		"internal/dl": {"amd64": {purego, sys}, "arm64": {purego, sys}},
	}
}

func TestLinked_AnEmbeddingEngineLinksTheseModules(t *testing.T) {
	cache := os.Getenv("GOMODCACHE")
	if cache == "" {
		cache = filepath.Join(filepath.SplitList(build.Default.GOPATH)[0], "pkg", "mod")
	}
	for pkg, arches := range linked() {
		for arch, want := range arches {
			got, err := Linked(root, pkg, cache, arch)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s on %s: modules (-listed +linked):\n%s", pkg, arch, d)
			}
		}
	}
}

// world makes a module with a cache of others.
func world(t *testing.T, files map[string]string) (root, cache string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "src"), filepath.Join(dir, "mod")
}

const smallMod = `module example.org/h

go 1.26

require example.com/one v1.0.0 // direct

require (
	example.com/one/deep/v2 v2.3.4
	example.com/Two v0.0.2 // indirect
	example.com/three v0.0.3 // indirect
)
`

func TestLinked_FollowsImportsAsABuildDoes(t *testing.T) {
	root, cache := world(t, map[string]string{
		"src/go.mod":                      smallMod,
		"src/a.go":                        "package h\nimport (\n_ \"fmt\"\n_ \"example.org/h/attic\"\n)",
		"src/a_test.go":                   "package h\nimport _ \"example.com/three\"",
		"src/attic/a.go":                  "package attic\nimport _ \"example.com/one/deep/v2/er\"",
		"src/attic/chest/a.go":            "package chest\nimport _ \"example.com/one\"", // not imported by h
		"mod/example.com/one@v1.0.0/a.go": "package one",
		"mod/example.com/one/deep/v2@v2.3.4/er/a.go":       "package er",
		"mod/example.com/one/deep/v2@v2.3.4/er/a_amd64.go": "package er\nimport _ \"example.com/Two\"",
		"mod/example.com/one/deep/v2@v2.3.4/er/gen.go":     "//go:build ignore\n\npackage main\nimport _ \"example.com/three\"",
		"mod/example.com/!two@v0.0.2/a.go":                 "package two\nimport _ \"example.com/Two/sub\"",
		"mod/example.com/!two@v0.0.2/sub/a.go":             "package sub",
	})
	for arch, want := range map[string][]string{
		"amd64": {"example.com/Two", "example.com/one/deep/v2"},
		"arm64": {"example.com/one/deep/v2"},
	} {
		got, err := Linked(root, ".", cache, arch)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v, modules (-want +got):\n%s", arch, err, d)
		}
	}
	got, err := Linked(root, "attic/chest", cache, "amd64")
	if d := cmp.Diff([]string{"example.com/one"}, got); d != "" || err != nil {
		t.Errorf("a folder: %v, modules (-want +got):\n%s", err, d)
	}
}

func TestLinked_SaysWhatItCannotFollow(t *testing.T) {
	const own = "package h\nimport _ \"example.com/one\""
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"no go.mod", map[string]string{"src/a.go": own}, "go.mod"},
		{"not required", map[string]string{"src/go.mod": "module example.org/h\n", "src/a.go": own}, "example.com/one is of no module that go.mod requires"},
		{"not downloaded", map[string]string{"src/go.mod": smallMod, "src/a.go": own}, "run go mod download"},
		{"no such package", map[string]string{"src/go.mod": smallMod, "src/a.go": "package h\nimport _ \"example.org/h/attic\""}, "example.org/h/attic has no folder"},
		{"replaced", map[string]string{"src/go.mod": smallMod + "replace example.com/one => ../one\n", "src/a.go": own}, "is replaced"},
		{"replaced in a block", map[string]string{"src/go.mod": smallMod + "replace (\n\texample.com/one => ../one\n)\n", "src/a.go": own}, "is replaced"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root, cache := world(t, tc.files)
			got, err := Linked(root, ".", cache, "amd64")
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v and error %v, want one with %q", got, err, tc.want)
			}
		})
	}
}
