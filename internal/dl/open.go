//go:build !nogpu && (amd64 || arm64)

package dl

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/kvferry/kvferry/fault"
)

// Enabled says whether this build opens libraries at all.
const Enabled = true

// Library is an opened library. It is never closed.
type Library struct {
	name   string
	handle uintptr
}

// Open opens the first of names that can be opened: file names as the loader of
// libraries searches them (ld.so.cache, LD_LIBRARY_PATH), or paths. Kind:
// fault.NotFound, with what was wrong with each; every text begins with a name.
func Open(names ...string) (*Library, error) {
	if len(names) == 0 {
		return nil, fault.New(fault.NotFound, "library", "no name to open one by")
	}
	var tried []error
	for _, name := range names {
		l, err := open(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
		if err == nil {
			return l, nil
		}
		tried = append(tried, err)
	}
	err := fault.Wrap(fault.NotFound, "", errors.Join(tried...))
	for _, name := range names {
		if _, found := os.Stat(name); found == nil && !strings.Contains(name, "/") {
			err = err.Hint("a name without a / is one that the loader looks up; for the file in this folder write ./%s", name)
		}
	}
	return nil, err
}

// OpenAll opens all of names, in their order, and returns the last. Each has the symbols
// of those before it, and stands in for a library of its own soname that a later one
// needs: so a library is opened whose needs the loader can't find by itself. What no
// function of theirs is called for need not be there. Their symbols are the whole
// process's from then on. Kind: fault.NotFound; those before the one that failed stay open.
func OpenAll(names ...string) (last *Library, err error) {
	if len(names) == 0 {
		return nil, fault.New(fault.NotFound, "library", "no name to open one by")
	}
	for _, name := range names {
		if last, err = open(name, purego.RTLD_LAZY|purego.RTLD_GLOBAL); err != nil {
			return nil, fault.Wrap(fault.NotFound, "", err)
		}
	}
	return last, nil
}

// open opens one library. The text of an error begins with its name.
func open(name string, mode int) (*Library, error) {
	runtime.LockOSThread() // the loader keeps what went wrong per thread
	defer runtime.UnlockOSThread()
	h, err := purego.Dlopen(name, mode)
	if err != nil {
		return nil, errors.New(reason(name, err))
	}
	return &Library{name, h}, nil
}

// reason is what the loader says of name, which it mostly says itself. Of a file for
// another machine it says that there is none.
func reason(name string, err error) string {
	s := err.Error()
	if !strings.HasPrefix(s, name) {
		s = fmt.Sprintf("%s: %s", name, s)
	}
	if f, err := elf.Open(name); err == nil {
		defer func() { _ = f.Close() }() // was only read
		own := elf.EM_X86_64
		if runtime.GOARCH == "arm64" {
			own = elf.EM_AARCH64
		}
		if f.Machine != own {
			s += fmt.Sprintf(" (the file is for %v, this program for %v)", f.Machine, own)
		}
	}
	return s
}

// Find returns the function of that name, 0 when the library has none.
func (l *Library) Find(symbol string) Func {
	p, err := purego.Dlsym(l.handle, symbol)
	if err != nil {
		return 0
	}
	return Func(p)
}
