package mooncake_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/internal/needtest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == mooncake.Verb {
		serve := mooncake.Serve
		if how := os.Getenv(brokenVariable); how != "" {
			serve = func() error { return misbehave(how) }
		}
		if err := serve(); err != nil {
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
		"child": func() (transfertest.Side, error) { return side(mooncake.Options{}) },
		"in process": func() (transfertest.Side, error) {
			s, err := side(mooncake.Options{InProcess: true})
			return kept(s), err // the process ends
		},
	})
	// More at a time than there are processors: most of them wait.
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
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
	if os.Getenv("CI") == "" { // there every test says itself what it lacks
		if _, err := mooncake.Check(tb.Context(), mooncake.Options{Libraries: files}); errors.Is(err, fault.NotFound) {
			needtest.Missing(tb, "Mooncake's library can't be opened: "+err.Error())
		}
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

// kept is a side whose engine is not closed with it: the library takes a second for that
// in its process.
func kept(s transfertest.Side) transfertest.Side {
	s.Engine = keptEngine{s.Engine}
	return s
}

type keptEngine struct{ transfer.Engine }

func (keptEngine) Close() error { return nil }
