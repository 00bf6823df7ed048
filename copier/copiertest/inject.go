package copiertest

import (
	"errors"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Inject wraps c: its Copy obeys the rules "fail pages" (nothing is enqueued) and "half
// pages" (half of the pages are, and the call fails).
func Inject(c copier.Copier, in *devicetest.Injector) copier.Copier { return &injected{c, in} }

type injected struct {
	copier.Copier
	in *devicetest.Injector
}

func (c *injected) Copy(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error) {
	if err := c.in.Hit(devicetest.FailPages); err != nil {
		return copier.Moved{}, err
	}
	if err := c.in.Hit(devicetest.HalfPages); err != nil {
		moved, copyErr := c.Copier.Copy(s, r, pairs[:len(pairs)/2])
		return moved, errors.Join(err, copyErr)
	}
	return c.Copier.Copy(s, r, pairs)
}
