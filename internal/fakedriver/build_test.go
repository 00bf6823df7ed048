package fakedriver

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/dl"
)

var keep = flag.String("keep", "", "write the fakes into this `folder`, for use by hand")

// TestKeep writes the newest of all libraries into the folder that -keep names, or that of
// the test: they can be opened there, and the runtime finds the driver beside itself.
func TestKeep(t *testing.T) {
	dir := *keep
	if dir == "" {
		dir = t.TempDir()
	}
	if !filepath.IsAbs(dir) {
		t.Fatalf("-keep %s: a test runs in the folder of its package, so give the whole path", dir)
	}
	check(t, os.MkdirAll(dir, 0o700))
	for _, vendor := range []Vendor{CUDA, HIP} {
		driver, runtime := buildIn(t, Options{Vendor: vendor}, dir)
		for _, path := range []string{driver, runtime} {
			if path != "" {
				open(t, path)
				t.Log(path)
			}
		}
		if runtime == "" {
			continue
		}
		b, err := dl.NewBlock(1)
		check(t, err)
		if code := int32(open(t, runtime).Find("cudaDriverGetVersion").Call(b.Addr)); code != 0 || b.Words[0] != CUDA130 {
			t.Errorf("the runtime says %d, driver version %d", code, b.Words[0])
		}
		b.Free()
	}
}

func TestSweep_BoundsTheCache(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	put := func(name string, age time.Duration) {
		path := filepath.Join(dir, name)
		if strings.HasPrefix(name, "build-") {
			check(t, os.Mkdir(path, 0o700))
			check(t, os.WriteFile(filepath.Join(path, "a.c"), nil, 0o600))
		} else {
			check(t, os.WriteFile(path, nil, 0o600))
		}
		check(t, os.Chtimes(path, now.Add(-age), now.Add(-age)))
	}
	var want []string
	for i := range cacheMost + 20 {
		name := fmt.Sprintf("%03d.so", i)
		if put(name, time.Duration(i)*time.Minute); i < cacheMost {
			want = append(want, name)
		}
	}
	put("old.so", cacheTime+time.Minute)
	put("new-1", cacheTime+time.Minute)
	put("build-1", cacheTime+time.Minute)
	put("new-2", cacheTime-time.Minute) // somebody writes it
	want = append(want, "new-2")
	sweep(dir, now)
	entries, err := os.ReadDir(dir)
	check(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("it has %v, want %v", got, want)
	}
	sweep(filepath.Join(dir, "none"), now) // nothing is there yet
}

// TestCompiled_NotesItsUse: a library that is in use is not the oldest.
func TestCompiled_NotesItsUse(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	first := compiled(t, runtimeFiles, CUDA128)
	files, err := filepath.Glob(filepath.Join(os.Getenv("XDG_CACHE_HOME"), "kvferry-fakedriver", "*.so"))
	if check(t, err); len(files) != 1 {
		t.Fatalf("the cache has %v", files)
	}
	old := time.Now().Add(-cacheTime)
	check(t, os.Chtimes(files[0], old, old))
	if !slices.Equal(first, compiled(t, runtimeFiles, CUDA128)) {
		t.Error("another library")
	}
	info, err := os.Stat(files[0])
	if check(t, err); !info.ModTime().After(old) {
		t.Error("its use was not noted")
	}
}
