package fakedriver

import (
	"os"
	"testing"

	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) {
	if verb := os.Getenv(childVerb); verb != "" {
		os.Exit(child(verb))
	}
	leaktest.Main(m)
}
