package fakedriver

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Build puts the driver that o asks for, and with CUDA the runtime over it, into a folder
// of the test: copies with state of their own, for each process that opens them. The
// runtime finds the driver beside itself.
func Build(tb testing.TB, o Options) (driver, runtime string) {
	tb.Helper()
	return buildIn(tb, o, tb.TempDir())
}

func buildIn(tb testing.TB, o Options, dir string) (driver, runtime string) {
	tb.Helper()
	if o.Vendor == HIP {
		return install(tb, compiled(tb, hipFiles, o.version()), dir, o.name("libfakehip.so", "libamdhip64.so.7")), ""
	}
	version := o.Runtime
	if version == 0 {
		version = o.version()
	}
	soname := "libcudart.so.12"
	if version >= CUDA130 {
		soname = "libcudart.so.13"
	}
	driver = install(tb, compiled(tb, cudaFiles, o.version()), dir, o.name("libfakecuda.so", "libcuda.so.1"))
	runtime = install(tb, compiled(tb, runtimeFiles, version), dir, o.name("libfakecudart.so", soname))
	return driver, runtime
}

func (o Options) name(fake, soname string) string {
	if o.Sonames {
		return soname
	}
	return fake
}

// Env returns the environment by which processes of the test get the options o, whose
// libraries Build has made. The end of the test fails it for what the fakes in them have
// noted, and for what they have not given back, even if they were killed. Processes that run
// at the same time share the books.
func Env(tb testing.TB, o Options) []string {
	tb.Helper()
	dir := tb.TempDir()
	log, state := filepath.Join(dir, "log"), filepath.Join(dir, "state")
	env := []string{"FAKE_LOG=" + log, "FAKE_STATE=" + state}
	for _, s := range o.settings() {
		env = append(env, "FAKE_"+strings.ToUpper(s[0])+"="+s[1])
	}
	tb.Cleanup(func() {
		if text, err := os.ReadFile(log); err == nil && !o.AllowViolations {
			for v := range strings.Lines(string(text)) {
				tb.Errorf("%s, in a process: %s", o.Vendor, strings.TrimSpace(v))
			}
		}
		text, err := os.ReadFile(state)
		if err != nil || o.AllowLeaks {
			return // no process has opened the library
		}
		words := make([]uint64, countFields)
		check(tb, binary.Read(bytes.NewReader(text), binary.NativeEndian, words))
		if c := countsOf(words); c.Leaks() != "" {
			tb.Errorf("%s, in a process: left behind: %s", o.Vendor, c.Leaks())
		}
	})
	return env
}
