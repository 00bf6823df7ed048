package gpu

import (
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
	"github.com/kvferry/kvferry/internal/dl"
)

// blockWords is the size of the blocks that hold arguments: one OS page. The first 64
// words are for what a call writes, and for handles; copies have the rest.
const blockWords = 512

// Library is a vendor's library with its functions. It is used by one device, or to
// list them all.
type Library struct {
	Name    string // as it is loaded: "libcuda.so.1"
	Version int    // as it counts
	Release string // the same, for people: "12.8"
	File    string // where it was found
	Visible string // what decides which devices there are, for people

	// Fail makes an error of a code that a call has returned. It is called on the thread
	// that got the code.
	Fail func(c abi.Call, code int) error

	// Clear has the thread forget the last error that the library keeps for it. Nil when
	// it keeps none.
	Clear func()

	// FDByAddress: an imported descriptor is passed by its address.
	FDByAddress bool

	Blocks *dl.Pool

	calls []abi.Call
	funcs []dl.Func
}

// Bind finds the functions of calls. Kind: fault.Unsupported, naming the first that
// there is not and must be.
func (l *Library) Bind(calls []abi.Call, find func(abi.Call) dl.Func) error {
	l.calls, l.funcs, l.Blocks = calls, make([]dl.Func, len(calls)), dl.NewPool(blockWords)
	for i, c := range calls {
		l.funcs[i] = find(c)
		if l.funcs[i] == 0 && !c.Optional {
			return fault.New(fault.Unsupported, l.Name, "version %s in %s has no function %s", l.Release, l.File, c.Export()).
				Hint("install a newer one, or name another library")
		}
	}
	return nil
}

// Has reports whether the library has all of these calls.
func (l *Library) Has(calls ...int) bool {
	for _, c := range calls {
		if l.funcs[c] == 0 {
			return false
		}
	}
	return true
}

// CanExport reports whether the library has all that ExportMemory and its like need.
func (l *Library) CanExport() bool {
	return l.Has(abi.IpcExport, abi.IpcOpen, abi.IpcClose, abi.IpcExportEvent, abi.IpcOpenEvent)
}

// CanMap reports whether the library has all that AllocShared and its like need.
func (l *Library) CanMap() bool {
	return l.Has(abi.MemGranularity, abi.MemCreate, abi.MemRelease, abi.MemExport, abi.MemImport, abi.MemReserve,
		abi.MemUnreserve, abi.MemMap, abi.MemUnmap, abi.MemSetAccess)
}

// Func returns the address of a call's function, 0 when there is none.
func (l *Library) Func(c int) dl.Func { return l.funcs[c] }

// Call makes a call that returns a code.
func (l *Library) Call(c int, args ...uintptr) error {
	if l.funcs[c] == 0 {
		return l.lacks(c)
	}
	return l.Check(c, l.funcs[c].Call(args...))
}

// Check makes an error of what a call has returned, nil for success.
func (l *Library) Check(c int, returned uintptr) error {
	code := Code(returned)
	if code == 0 {
		return nil
	}
	err := l.Fail(l.calls[c], code)
	l.clear()
	return err
}

func (l *Library) clear() {
	if l.Clear != nil {
		l.Clear()
	}
}

// Code is the code in the word that a call has returned.
func Code(returned uintptr) int { return int(int32(returned)) }

func (l *Library) lacks(c int) error {
	return fault.New(fault.Unsupported, l.Name, "version %s has no function %s", l.Release, l.calls[c].Export()).
		Hint("install a newer driver")
}

// Out makes a call that writes a word to where its first argument says. What it does not
// write of the word is 0.
func (l *Library) Out(c int, args ...uintptr) (uint64, error) {
	b, err := l.Blocks.Get()
	if err != nil {
		return 0, err
	}
	defer l.Blocks.Put(b)
	b.Words[0] = 0
	var all [dl.MaxArgs]uintptr
	all[0] = b.Addr
	n := 1 + copy(all[1:], args)
	if err := l.Call(c, all[:n]...); err != nil {
		return 0, err
	}
	return b.Words[0], nil
}
