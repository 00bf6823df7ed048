// Package fault holds the closed lists that cross every layer of kvferry: the
// kinds an error can have, and the reasons for which a page that was asked for
// is not there.
//
// A kind is stable: callers branch on it with errors.Is(err, fault.Full) and it
// decides the exit status of the command line. Everything else in an [Error] is
// for people: the object that failed, what is wrong with it (value and limit)
// and what can be done about it.
package fault

import (
	"errors"
	"fmt"
)

// Kind classifies an error. Kinds are themselves errors, so that
// errors.Is(err, fault.Full) asks "is this err of kind Full?".
type Kind uint8

// The kinds of error. The list is closed: a new one needs a reason that none of
// these covers, an exit status, and a line in docs/ARCHITECTURE.md.
const (
	_           Kind = iota
	Invalid          // an argument or an input is out of range, or contradicts another
	Full             // no room now: the same call can succeed once something was released
	NotFound         // the thing named does not exist
	Exists           // the thing named exists already
	Busy             // the thing named is in a state that forbids this call for now
	Corrupt          // bytes are not what they were: they were discarded, never handed out
	Memory           // the machine or its limits have less memory than was asked for
	Device           // a device, its driver or one of its streams failed
	Unsupported      // this geometry, device or build cannot do that
	Closed           // the thing named was closed
)

var kindNames = [...]string{
	Invalid: "invalid", Full: "full", NotFound: "not found", Exists: "exists", Busy: "busy",
	Corrupt: "corrupt", Memory: "not enough memory", Device: "device", Unsupported: "unsupported", Closed: "closed",
}

// Error returns the name of the kind.
func (k Kind) Error() string {
	if k == 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("kind %d", uint8(k))
	}
	return kindNames[k]
}

// Error is a failure with a kind, the object it happened to and, when there is
// one, a remedy. The zero value of every field but Kind may be left out.
type Error struct {
	Kind   Kind
	Object string // what failed: "page 17", "chat.jsonl:3: hash_ids"
	Detail string // what is wrong with it, with the value and the limit
	Remedy string // what the caller can do; never repeated in Error()
	Err    error  // the cause
}

// New returns an error of the given kind about object.
func New(kind Kind, object, format string, args ...any) *Error {
	return &Error{Kind: kind, Object: object, Detail: fmt.Sprintf(format, args...)}
}

// Wrap returns an error of the given kind about object, caused by err.
func Wrap(kind Kind, object string, err error) *Error {
	return &Error{Kind: kind, Object: object, Err: err}
}

// Hint sets the remedy and returns e.
func (e *Error) Hint(format string, args ...any) *Error {
	e.Remedy = fmt.Sprintf(format, args...)
	return e
}

func (e *Error) Error() string {
	s := e.Object
	for _, part := range []string{e.Detail, errText(e.Err)} {
		switch {
		case part == "":
		case s == "":
			s = part
		default:
			s += ": " + part
		}
	}
	if s == "" {
		return e.Kind.Error()
	}
	return s
}

// Unwrap makes errors.Is match both the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// KindOf returns the kind of err, or 0 when it has none.
func KindOf(err error) Kind {
	k, _ := errors.AsType[Kind](err)
	return k
}

// RemedyOf returns the first remedy found in err, or "".
func RemedyOf(err error) string {
	var e *Error
	for errors.As(err, &e) {
		if e.Remedy != "" {
			return e.Remedy
		}
		err = e.Err
	}
	return ""
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
