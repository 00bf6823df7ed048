package abi

import "cmp"

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
