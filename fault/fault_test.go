package fault

import (
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestError_HasItsKindAndItsCause(t *testing.T) {
	err := fmt.Errorf("outer: %w", Wrap(Device, "stream s", io.ErrUnexpectedEOF))
	if !errors.Is(err, Device) || !errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, Full) || KindOf(err) != Device {
		t.Errorf("%v is of kind %v", err, KindOf(err))
	}
	if k := KindOf(io.EOF); k != 0 || KindOf(nil) != 0 {
		t.Errorf("an error of no kind has %v", k)
	}
	// The kind nearest to the caller decides.
	if err := Wrap(Device, "copy", New(Corrupt, "page 3", "wrong")); KindOf(err) != Device || !errors.Is(err, Corrupt) {
		t.Errorf("%v is of kind %v", err, KindOf(err))
	}
}

func TestError_SaysWhatItIsAbout(t *testing.T) {
	for _, test := range []struct {
		err  *Error
		want string
	}{
		{New(Full, "pages", "%d too few", 3), "pages: 3 too few"},
		{Wrap(Memory, "pool", io.EOF), "pool: EOF"},
		{&Error{Kind: Invalid, Object: "a", Detail: "b", Err: io.EOF}, "a: b: EOF"},
		{New(Full, "pages", "none").Hint("release some"), "pages: none"},
		{&Error{Kind: Busy}, "busy"},
	} {
		if got := test.err.Error(); got != test.want {
			t.Errorf("%#v says %q, want %q", test.err, got, test.want)
		}
	}
}

func TestRemedyOf_IsTheOutermostThereIs(t *testing.T) {
	inner := New(Full, "pages", "none").Hint("release %d", 2)
	for _, test := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{io.EOF, ""},
		{fmt.Errorf("x: %w", inner), "release 2"},
		{Wrap(Full, "device", inner), "release 2"},
		{Wrap(Full, "device", inner).Hint("wait"), "wait"},
		{Wrap(Full, "device", io.EOF), ""},
	} {
		if got := RemedyOf(test.err); got != test.want {
			t.Errorf("the remedy of %v is %q, want %q", test.err, got, test.want)
		}
	}
}

func TestNames_AreThereForAllAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	add := func(name string) {
		if name == "" || seen[name] {
			t.Errorf("%q is no name, or somebody else's", name)
		}
		seen[name] = true
	}
	for k := Invalid; k <= Closed; k++ {
		add(k.Error())
	}
	for r := range Reason(NumReasons) {
		add(r.String())
	}
	for _, unknown := range []string{Kind(0).Error(), Kind(200).Error(), Reason(200).String()} {
		add(unknown)
	}
}
