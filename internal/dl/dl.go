package dl

import (
	"bufio"
	"os"
	"strconv"
	"strings"
)

const (
	// MaxArgs is the most words that a call can pass.
	MaxArgs = 14
	// HandleWords is the size of a struct that is passed by value, see [Func.CallHandle].
	HandleWords = 8
)

// Func is the address of a C function, 0 when there is none.
type Func uintptr

// Name returns the name by which the library was opened.
func (l *Library) Name() string { return l.name }

// Mapped returns the files in this process's memory whose names begin with prefix: the
// libraries that somebody else has opened.
func Mapped(prefix string) []string {
	var found []string
	seen := map[string]bool{}
	eachMapping(func(_, _ uint64, file string) {
		if base := file[strings.LastIndexByte(file, '/')+1:]; strings.HasPrefix(base, prefix) && !seen[file] {
			seen[file] = true
			found = append(found, file)
		}
	})
	return found
}

// File returns the file that f lies in, "" when it can't be told.
func (f Func) File() (name string) {
	eachMapping(func(lo, hi uint64, file string) {
		if lo <= uint64(f) && uint64(f) < hi {
			name = file
		}
	})
	return name
}

// eachMapping calls visit for every file that is mapped into this process.
func eachMapping(visit func(lo, hi uint64, file string)) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }() // was only read
	for in := bufio.NewScanner(f); in.Scan(); {
		at := strings.IndexByte(in.Text(), '/')
		from, rest, _ := strings.Cut(in.Text(), "-")
		to, _, _ := strings.Cut(rest, " ")
		lo, err1 := strconv.ParseUint(from, 16, 64)
		hi, err2 := strconv.ParseUint(to, 16, 64)
		if at > 0 && err1 == nil && err2 == nil {
			visit(lo, hi, in.Text()[at:])
		}
	}
}
