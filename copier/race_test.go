//go:build race

package copier_test

// raced: with the race detector, sync.Pool forgets what it was given now and then.
const raced = true
