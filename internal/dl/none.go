//go:build nogpu || !(amd64 || arm64)

package dl

import "github.com/kvferry/kvferry/fault"

// Enabled says whether this build opens libraries at all.
const Enabled = false

// Library is an opened library; there is none in this build.
type Library struct{ name string }

// Open refuses: this build opens no libraries. Kind: fault.Unsupported.
func Open(names ...string) (*Library, error) {
	what := "library"
	if len(names) > 0 {
		what = names[0]
	}
	return nil, fault.New(fault.Unsupported, what, "this build opens no libraries").Hint("build without -tags nogpu, on amd64 or arm64")
}

// OpenAll refuses as Open does.
func OpenAll(names ...string) (*Library, error) { return Open(names...) }

// Find returns 0: no library is open in this build.
func (*Library) Find(string) Func { return 0 }

// Call must not be reached: no Func can be found in this build.
func (Func) Call(...uintptr) uintptr { panic("dl: a call in a build that opens no libraries") }

// CallHandle must not be reached, as Call.
func (f Func) CallHandle(uintptr, *Block, uintptr) uintptr { return f.Call() }
