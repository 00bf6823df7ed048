package transfer

import (
	"io"
	"os"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// progress shows how many bytes of all there are, on a terminal. Nil shows nothing. Its
// methods are called by one goroutine at a time.
type progress struct {
	all *mpb.Progress
	bar *mpb.Bar
}

// newProgress starts a bar of total bytes on w. It is nil where w is not a terminal, so
// that logs and pipes stay clean. close must be called.
func newProgress(w io.Writer, what string, total int64) *progress {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || total == 0 {
		return nil
	}
	p := &progress{all: mpb.New(mpb.WithOutput(f), mpb.WithWidth(48))}
	p.bar = p.all.AddBar(total,
		mpb.BarRemoveOnComplete(),
		mpb.PrependDecorators(decor.Name(what+" "), decor.CountersKibiByte("% .0f of % .0f ")),
		mpb.AppendDecorators(decor.Percentage(), decor.Name("  "), decor.AverageETA(decor.ET_STYLE_GO)),
	)
	return p
}

// step counts bytes.
func (p *progress) step(bytes int64) {
	if p != nil {
		p.bar.IncrInt64(bytes)
	}
}

// close takes the bar away and waits until the terminal is left alone. It may be called
// at any point, more than once.
func (p *progress) close() {
	if p != nil {
		p.bar.Abort(true)
		p.all.Wait()
	}
}
