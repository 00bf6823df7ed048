package copiertest

import (
	"errors"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Inject wraps c: its Copy and, if it has one, its CopySummed obey the rules "fail
// pages" (nothing is enqueued) and "half pages" (half of the pages are, and the call
// fails).
func Inject(c copier.Copier, in *devicetest.Injector) copier.Copier {
	if sums, ok := c.(summer); ok {
		return &injectedSummer{injected{c, in}, sums}
	}
	return &injected{c, in}
}

// summer is a copier that gives digests what it copies: see [copier.Portable].
type summer interface {
	CopySummed(s device.Stream, r *kv.Route, pairs []page.Pair, digests []device.Digest) (copier.Moved, error)
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
