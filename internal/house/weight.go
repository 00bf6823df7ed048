package house

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"go/build"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
)

// Linked returns the modules that a program links which imports the package in folder
// pkg ("." for the root package) of the module in folder root: sorted, without that
// module itself and the standard library, for Linux on the given architecture and
// without cgo. cache is the folder of downloaded modules, as `go env GOMODCACHE`
// prints it.
//
// It follows imports by itself and reads versions from go.mod, which must name
// every module (the go command sees to that) and must not replace any.
func Linked(root, pkg, cache, arch string) ([]string, error) {
	mod, err := readMod(filepath.Join(root, "go.mod"))
	if err != nil {
		return nil, err
	}
	ctxt := build.Default
	ctxt.GOOS, ctxt.GOARCH, ctxt.CgoEnabled, ctxt.BuildTags = "linux", arch, false, nil
	linked, seen := map[string]bool{}, map[string]bool{}
	for queue := []string{path.Join(mod.path, pkg)}; len(queue) > 0; queue = queue[1:] {
		imported := queue[0]
		first, _, _ := strings.Cut(imported, "/")
		if seen[imported] || !strings.Contains(first, ".") {
			continue
		}
		seen[imported] = true
		var dir string
		if rest, ok := mod.below(imported, mod.path); ok {
			dir = filepath.Join(root, rest)
		} else {
			module, rest, err := mod.find(imported)
			if err != nil {
				return nil, err
			}
			linked[module] = true
			dir = filepath.Join(cache, escape(module)+"@"+mod.versions[module], rest)
		}
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%s has no folder %s: run go mod download", imported, dir)
		}
		found, err := ctxt.ImportDir(dir, 0)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", imported, err)
		}
		queue = append(queue, found.Imports...)
	}
	return slices.Sorted(maps.Keys(linked)), nil
}

// goMod is what go.mod says.
type goMod struct {
	path     string
	versions map[string]string // by module
}

func readMod(name string) (*goMod, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	m := &goMod{versions: map[string]string{}}
	block := ""
	for in := bufio.NewScanner(bytes.NewReader(text)); in.Scan(); {
		line, _, _ := strings.Cut(in.Text(), "//")
		f := strings.Fields(line)
		if block != "" {
			f = append([]string{block}, f...)
		}
		switch {
		case len(f) < 2: // blank, or nothing but the name of the block
		case f[1] == ")":
			block = ""
		case f[1] == "(":
			block = f[0]
		case f[0] == "module":
			m.path = f[1]
		case f[0] == "require" && len(f) == 3:
			m.versions[f[1]] = f[2]
		case f[0] == "replace":
			return nil, fmt.Errorf("%s: a module is replaced: whoever imports this one does not see that", name)
		}
	}
	return m, nil
}

// below reports whether a package belongs to a module, and where in it.
func (*goMod) below(imported, module string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(imported, module)
	return strings.TrimPrefix(rest, "/"), ok && (rest == "" || rest[0] == '/')
}

// find returns the module that a package belongs to: the one with the longest path.
func (m *goMod) find(imported string) (module, rest string, err error) {
	for name := range m.versions {
		if r, ok := m.below(imported, name); ok && len(name) > len(module) {
			module, rest = name, r
		}
	}
	if module == "" {
		return "", "", fmt.Errorf("%s is of no module that go.mod requires", imported)
	}
	return module, rest, nil
}

// escape writes a module path as the cache of modules does: capitals as ! and a
// small letter.
func escape(module string) string {
	var b strings.Builder
	for _, r := range module {
		if unicode.IsUpper(r) {
			b.WriteByte('!')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
