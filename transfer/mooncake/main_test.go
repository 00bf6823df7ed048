package mooncake_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/internal/needtest"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == mooncake.Verb {
		if err := mooncake.Serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if mode, ok := os.LookupEnv(ownerVariable); ok {
		if err := own(mode); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	transfertest.Child(map[string]func() (transfertest.Side, error){
		"child":      func() (transfertest.Side, error) { return side(mooncake.Options{}) },
		"in process": func() (transfertest.Side, error) { return side(mooncake.Options{InProcess: true}) },
	})
	leaktest.Main(m)
}

// librariesFile lists the real library and what is to be opened before it, which
// e2e/fetch has fetched.
func librariesFile() string {
	dir := os.Getenv("KVFERRY_VENDOR")
	if dir == "" {
		dir = filepath.Join("..", "..", ".vendor")
	}
	return filepath.Join(dir, "mooncake", "libraries")
}

func libraries() ([]string, error) {
	text, err := os.ReadFile(librariesFile())
	return strings.Fields(string(text)), err
}

// need returns the libraries.
func need(tb testing.TB) []string {
	tb.Helper()
	files, err := libraries()
	if err != nil {
		needtest.Missing(tb, "Mooncake's library is missing: e2e/fetch fetches it: "+err.Error())
	}
	return files
}

// side is an owner or a reader, by the real library.
func side(o mooncake.Options) (s transfertest.Side, err error) {
	if o.Libraries, err = libraries(); err != nil {
		return s, err
	}
	o.Listen = "127.0.0.1"
	s.Engine, err = mooncake.New(o)
	return s, err
}
