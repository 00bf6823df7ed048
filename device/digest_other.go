//go:build !amd64

package device

// fastest returns no [accumulator].
func fastest() accumulator { return nil }
