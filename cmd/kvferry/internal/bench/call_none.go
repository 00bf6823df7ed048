//go:build nogpu || !(amd64 || arm64)

package bench

import (
	"context"

	"github.com/kvferry/kvferry/internal/dl"
)

// Call refuses: this build opens no libraries. Kind: fault.Unsupported.
func Call(context.Context, Options) (*Report, error) {
	_, err := dl.Open("libc.so.6")
	return nil, err
}
