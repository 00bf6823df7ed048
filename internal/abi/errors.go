package abi

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/kvferry/kvferry/fault"
)

// Class says what an error means for what comes after. The values are those of
// device.Class.
type Class uint8

// The classes.
const (
	Failed Class = iota // this call has failed, other work goes on
	Retry               // it may succeed later
	Lost                // every later call on this device fails
)

// Error is an error code of a vendor's library.
type Error struct {
	Code  int
	Name  string // in the vendor's headers
	Class Class
	Kind  fault.Kind // 0 stands for fault.Device
}

// find returns the entry of code in a table that is sorted by codes. A code that is not
// there has no name but its number.
func find(table []Error, code int) Error {
	i, ok := slices.BinarySearchFunc(table, code, func(e Error, c int) int { return cmp.Compare(e.Code, c) })
	e := Error{Code: code, Name: "error " + strconv.Itoa(code)}
	if ok {
		e = table[i]
	}
	e.Kind = cmp.Or(e.Kind, fault.Device)
	return e
}
