package fakedriver

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/needtest"
)

//go:embed csrc
var sources embed.FS

// flags are those of every library. Symbols are hidden unless they are exported by name,
// so that a version lacks what it must lack.
var flags = []string{"-shared", "-fPIC", "-O1", "-g", "-pthread", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra"}

// Files of the libraries, beside those that all drivers share.
var (
	coreFiles    = []string{"control.c", "copy.c", "event.c", "exports.c", "memory.c", "pin.c", "share.c", "stream.c", "vmm.c"}
	cudaFiles    = append([]string{"cuda.c", "cudacopy.c", "cudashare.c"}, coreFiles...)
	hipFiles     = append([]string{"hip.c", "hipshare.c"}, coreFiles...)
	runtimeFiles = []string{"cudart.c"}
)

// compiled returns the library of these files for a version, which is built once for
// all processes that test the same sources with the same compiler.
func compiled(tb testing.TB, files []string, version int) (text []byte) {
	tb.Helper()
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	words := strings.Fields(compiler)
	path, err := exec.LookPath(words[0])
	if err != nil {
		needtest.Missing(tb, fmt.Sprintf("no C compiler (%s), which builds the fake drivers: Debian: apt-get install gcc libc6-dev", compiler))
	}
	args := append(words[1:], flags...)
	args = append(args, fmt.Sprintf("-DFAKE_VERSION=%d", version))

	name := digest(tb, path, args, files)
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	dir := filepath.Join(cache, "kvferry-fakedriver")
	library := filepath.Join(dir, name+".so")
	if text, err := os.ReadFile(library); err == nil {
		now := time.Now()
		_ = os.Chtimes(library, now, now) // its last use: who sweeps may have been faster
		return text
	}
	work := tb.TempDir()
	c, err := fs.Sub(sources, "csrc")
	check(tb, err)
	check(tb, os.CopyFS(work, c))
	out := filepath.Join(work, name+".so")
	args = append(args, "-o", out)
	args = append(args, files...)
	args = append(args, "-ldl")
	cmd := exec.CommandContext(context.Background(), path, args...)
	cmd.Dir = work
	if said, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("%s: %v\n%s", cmd, err, said)
	}
	text, err = os.ReadFile(out)
	check(tb, err)
	publish(tb, text, library)
	sweep(dir, time.Now())
	return text
}

// publish puts a library into the cache, where who looks for it finds all of it, or none.
func publish(tb testing.TB, text []byte, library string) {
	tb.Helper()
	check(tb, os.MkdirAll(filepath.Dir(library), 0o700))
	f, err := os.CreateTemp(filepath.Dir(library), "new-")
	check(tb, err)
	_, err = f.Write(text)
	check(tb, err)
	check(tb, f.Close())
	check(tb, os.Rename(f.Name(), library))
}

// The cache keeps so many libraries, for so long after their last use. One state of the
// sources is a dozen.
const (
	cacheMost = 48
	cacheTime = 24 * time.Hour
)

// sweep removes from the cache what nobody uses any more, and what processes that were
// killed have left. Who misses a library builds it again.
func sweep(dir string, now time.Time) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // the next who builds tries again
	}
	used := map[string]time.Time{}
	var libraries []string // the latest use first
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // somebody else's sweep
		}
		path := filepath.Join(dir, e.Name())
		if now.Sub(info.ModTime()) > cacheTime {
			_ = os.RemoveAll(path)
		} else if strings.HasSuffix(e.Name(), ".so") {
			used[path] = info.ModTime()
			libraries = append(libraries, path)
		}
	}
	slices.SortFunc(libraries, func(a, b string) int { return used[b].Compare(used[a]) })
	for _, path := range libraries[min(cacheMost, len(libraries)):] {
		_ = os.Remove(path)
	}
}

// digest names what is built from files, and how.
func digest(tb testing.TB, compiler string, args, files []string) string {
	tb.Helper()
	h := sha256.New()
	add := func(what ...any) { h.Write(fmt.Appendln(nil, what...)) }
	add(compiler, args, files)
	if info, err := os.Stat(compiler); err == nil {
		add(info.Size(), info.ModTime().UnixNano())
	}
	check(tb, fs.WalkDir(sources, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := sources.ReadFile(name)
		add(name, len(text), string(text))
		return err
	}))
	return hex.EncodeToString(h.Sum(nil)[:12])
}

// install puts a copy of a library into dir: the loader knows libraries by their files,
// so that each copy has variables of its own.
func install(tb testing.TB, library []byte, dir, name string) string {
	tb.Helper()
	path := filepath.Join(dir, name)
	check(tb, os.WriteFile(path, library, 0o700))
	return path
}

func check(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
