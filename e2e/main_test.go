package e2e

import (
	"fmt"
	"os"
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case len(os.Args) == 2 && os.Args[1] == mooncake.Verb:
		err = mooncake.Serve()
	case os.Getenv(writerVariable) != "":
		err = write(os.Getenv(writerVariable))
	default:
		leaktest.Main(m)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
