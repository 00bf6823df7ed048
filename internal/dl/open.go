//go:build !nogpu && (amd64 || arm64)

package dl

import (
	"errors"
	"fmt"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/kvferry/kvferry/fault"
)

// Open opens the first of names that can be opened: file names as the loader of
// libraries searches them (ld.so.cache, LD_LIBRARY_PATH), or paths. Kind:
// fault.NotFound, with what was wrong with each.
func Open(names ...string) (*Library, error) {
	var tried []error
	for _, name := range names {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
		if err == nil {
			return &Library{name, h}, nil
		}
		tried = append(tried, errors.New(reason(name, err)))
	}
	return nil, fault.Wrap(fault.NotFound, "library", errors.Join(tried...))
}

// reason is what the loader says of name, which it mostly says itself.
func reason(name string, err error) string {
	if s := err.Error(); strings.Contains(s, name) {
		return s
	}
	return fmt.Sprintf("%s: %v", name, err)
}

// Find returns the function of that name, 0 when the library has none.
func (l *Library) Find(symbol string) Func {
	p, err := purego.Dlsym(l.handle, symbol)
	if err != nil {
		return 0
	}
	return Func(p)
}
