package doctor

import (
	"fmt"
	"os"
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == mooncake.Verb { // the process in which the doctor tries its library
		if err := mooncake.Serve(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	leaktest.Main(m)
}
