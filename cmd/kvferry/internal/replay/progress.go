package replay

import (
	"io"
	"os"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// Progress shows how many requests were replayed. It shows nothing when w is
// not a terminal, so that logs and pipes stay clean. Its methods may be called
// by one goroutine at a time; nil is a Progress that shows nothing.
type Progress struct {
	all  *mpb.Progress
	bar  *mpb.Bar
	done int64
	step int64 // requests between two updates: drawing must not cost time
}

// NewProgress starts a bar of total requests on w. Close must be called.
func NewProgress(w io.Writer, total int) *Progress {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	p := &Progress{all: mpb.New(mpb.WithOutput(f), mpb.WithWidth(48)), step: max(int64(total)/1000, 1)}
	p.bar = p.all.AddBar(int64(total),
		mpb.BarRemoveOnComplete(),
		mpb.PrependDecorators(decor.Name("replaying "), decor.CountersNoUnit("%d of %d requests ")),
		mpb.AppendDecorators(decor.Percentage(), decor.Name("  "), decor.AverageETA(decor.ET_STYLE_GO)),
	)
	return p
}

// Step counts one request.
func (p *Progress) Step() {
	if p == nil {
		return
	}
	if p.done++; p.done%p.step == 0 {
		p.bar.SetCurrent(p.done)
	}
}

// Close takes the bar away and waits until the terminal is left alone. It may
// be called at any point, more than once.
func (p *Progress) Close() {
	if p == nil {
		return
	}
	p.bar.Abort(true)
	p.all.Wait()
}
