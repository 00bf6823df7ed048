package transfer

import (
	"context"
	"errors"
	"log/slog"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
)

// refusal is a reader that an engine has refused.
type refusal struct {
	engine string
	peer   string
	err    error
	others int64 // that were refused before it, and not told of
}

// refusals is the handler of a logger that engines tell of refusals. What nobody takes is
// lost: readers don't wait for our log.
type refusals chan refusal

// Enabled implements [slog.Handler].
func (refusals) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

// Handle implements [slog.Handler], for what package tcp says.
func (c refusals) Handle(_ context.Context, r slog.Record) error {
	x := refusal{engine: engines.TCP}
	r.Attrs(func(a slog.Attr) bool {
		switch v := a.Value.Any().(type) {
		case error:
			x.err = v
		case string:
			x.peer = v
		case int64:
			x.others = v
		}
		return true
	})
	if x.err == nil {
		x.err = errors.New(r.Message)
	}
	select {
	case c <- x:
	default:
	}
	return nil
}

// WithAttrs implements [slog.Handler].
func (c refusals) WithAttrs([]slog.Attr) slog.Handler { return c }

// WithGroup implements [slog.Handler].
func (c refusals) WithGroup(string) slog.Handler { return c }
