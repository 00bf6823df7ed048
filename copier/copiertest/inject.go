package copiertest

import (
	"errors"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Inject wraps c: its Copy and, if it has one, its CopySummed or CopySealed obey the
// rules "fail pages" (nothing is enqueued) and "half pages" (half of the pages are, and
// the call fails).
func Inject(c copier.Copier, in *devicetest.Injector) copier.Copier {
	switch w := c.(type) {
	case summer:
		return &injectedSummer{injected{c, in}, w}
	case sealer:
		return &injectedSealer{injected{c, in}, w}
	}
	return &injected{c, in}
}

// summer is a copier that gives digests what it copies: see [copier.Portable].
type summer interface {
	CopySummed(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest) (copier.Moved, error)
}

// sealer is a copier that makes a difference between pages: see [copier.Accelerated].
type sealer interface {
	CopySealed(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error)
}

type injected struct {
	copier.Copier
	in *devicetest.Injector
}

func (c *injected) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	return c.strike(len(pairs), func(n int) (copier.Moved, error) { return c.Copier.Copy(s, r, pairs[:n]) })
}

// strike copies n pages, fewer or none, as the rules say.
func (c *injected) strike(n int, copyPages func(n int) (copier.Moved, error)) (copier.Moved, error) {
	if err := c.in.Hit(devicetest.FailPages); err != nil {
		return copier.Moved{}, err
	}
	if err := c.in.Hit(devicetest.HalfPages); err != nil {
		moved, copyErr := copyPages(n / 2)
		return moved, errors.Join(err, copyErr)
	}
	return copyPages(n)
}

type injectedSummer struct {
	injected
	sums summer
}

func (c *injectedSummer) CopySummed(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest) (copier.Moved, error) {
	return c.strike(len(pairs), func(n int) (copier.Moved, error) { return c.sums.CopySummed(s, r, pairs[:n], digests[:n]) })
}

type injectedSealer struct {
	injected
	seals sealer
}

func (c *injectedSealer) CopySealed(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	return c.strike(len(pairs), func(n int) (copier.Moved, error) { return c.seals.CopySealed(s, r, pairs[:n]) })
}
