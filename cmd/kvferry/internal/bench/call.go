//go:build !nogpu && (amd64 || arm64)

package bench

import (
	"context"
	"fmt"

	"github.com/ebitengine/purego"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/dl"
)

// callReps is how many calls a run makes.
const callReps = 200_000

// Call measures a call into a C library that was opened at run time, which every copy
// on an accelerator makes, beside purego's. Kinds: fault.Invalid; fault.NotFound (no
// libc); or ctx's error.
func Call(ctx context.Context, o Options) (*Report, error) {
	o, err := o.check()
	if err != nil {
		return nil, err
	}
	libc, err := dl.Open("libc.so.6", "libc.so")
	if err != nil {
		return nil, err
	}
	f := libc.Find("labs") // looks at one word, whatever it is given
	if f == 0 {
		return nil, fault.New(fault.NotFound, libc.Name(), "has no labs")
	}
	r := newReport("call", o)
	r.legend = "purego: its SyscallN, for the same function and words."
	r.Settings = append(r.Settings, Setting{"function", "labs of " + f.File()})
	return r, o.measured(r, func() error {
		section := Section{Title: "a call into C, of so many words", Unit: "ns"}
		for _, words := range []int{6, 8, 14} {
			args := make([]uintptr, words)
			seconds, err := o.interleave(ctx, []contestant{
				{run: func() error {
					for range callReps {
						f.Call(args...)
					}
					return nil
				}},
				{run: func() error {
					for range callReps {
						purego.SyscallN(uintptr(f), args...)
					}
					return nil
				}},
			})
			if err != nil {
				return err
			}
			ours := each(seconds[0][0], nanos(callReps))
			l := newLine(fmt.Sprintf("%d words", words), statOf(ours), map[string]any{"words": words})
			l.against("purego", ours, each(seconds[0][1], nanos(callReps)))
			l.atMost("", 60)
			l.atMost("purego", 0.5)
			section.Lines = append(section.Lines, l)
		}
		r.Sections = append(r.Sections, section)
		return nil
	})
}
