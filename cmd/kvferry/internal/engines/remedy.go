package engines

import (
	"errors"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// Remedy is what the user of flags can do about an error of the engine of that name, ""
// where only its caller may know.
func (s *Set) Remedy(name string, err error) string {
	if m, ok := errors.AsType[*tcp.ModeError](err); ok {
		if m.TLS {
			return "give --tls here too, as the other side has it"
		}
		return "leave --tls out, as the other side has it not, or give it to both"
	}
	switch {
	case s.LibraryFailed(name, err):
		return libraryRemedy
	case errors.Is(err, unix.ECONNREFUSED) && name == TCP:
		return "is kvferry transfer serve still running, and does it listen on this address? Start it again, and give its new descriptor"
	case errors.Is(err, unix.ECONNREFUSED) && !Network(name):
		return "" // its socket is there, and nobody listens any more
	case errors.Is(err, fault.NotFound) && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)) && !Network(name):
		if hint := remedyOf(err); hint != "" { // of a socket
			return hint + " (XDG_RUNTIME_DIR)"
		}
	case errors.Is(err, fault.Full):
		return "try again when other readers have ended"
	}
	switch hint := remedyOf(err); hint {
	case "ask it to publish again", "ask the owner to publish again": // which is a command: its caller knows
		return ""
	default:
		return hint
	}
}

// LibraryFailed reports whether err is about a file that was named as Mooncake's library:
// then nothing of it is the other side's fault.
func (s *Set) LibraryFailed(name string, err error) bool {
	kind := fault.KindOf(err)
	return name == Mooncake && (kind == fault.NotFound || kind == fault.Unsupported) &&
		slices.ContainsFunc(s.o.Mooncake, func(file string) bool { return strings.Contains(err.Error(), file+":") })
}

// Network reports whether the engine of that name reads from other hosts, too.
func Network(name string) bool { return name == TCP || name == Mooncake }
