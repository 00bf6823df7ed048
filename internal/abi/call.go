package abi

import (
	"cmp"

	"github.com/kvferry/kvferry/internal/dl"
)

// Call is a function of a vendor's library, in the form that kvferry calls.
type Call struct {
	Name     string // as its documentation has it
	Symbol   string // as the library exports this form; "" for Name
	Version  int    // of the library that brought this form
	Args     string // in C
	Optional bool   // kvferry does without it, and says so
}

// Export returns the name under which the library exports this form.
func (c Call) Export() string { return cmp.Or(c.Symbol, c.Name) }

// Bind finds the functions of calls, in their order. missing is the first that there is
// not and must be, nil when all are there.
func Bind(calls []Call, find func(Call) dl.Func) (funcs []dl.Func, missing *Call) {
	funcs = make([]dl.Func, len(calls))
	for i, c := range calls {
		if funcs[i] = find(c); funcs[i] == 0 && !c.Optional && missing == nil {
			missing = &calls[i]
		}
	}
	return funcs, missing
}
