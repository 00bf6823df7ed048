//go:build race

package mooncake_test

// raced: with the race detector, sync.Pool forgets what it was given now and then, and
// filling a cache takes long.
const (
	raced    = true
	bigPages = 128
)
