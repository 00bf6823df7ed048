package mooncake

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	turnName  = "@kvferry mooncake ports" // abstract: of a network namespace, as ports are
	turnLimit = 2 * time.Second           // engines start in 20 ms, but for what a metadata server takes
)

// turn waits until no other engine of kvferry's on this host looks for ports, and returns
// when that has taken limit: what it keeps from happening is rare, and a name can be kept
// by anybody. end lets the next one look; the end of the process does too.
//
// The library binds a free port to see that it is free, closes it, and binds it once more.
// Two engines that do so at the same time may choose the same one, and the library ends
// the process of whoever comes second.
func turn(limit time.Duration) (end func()) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return func() {} // the library will say what is wrong with sockets
	}
	for began := time.Now(); ; nap(time.Millisecond) {
		err := unix.Bind(fd, &unix.SockaddrUnix{Name: turnName})
		if err != unix.EADDRINUSE || time.Since(began) >= limit {
			return func() { _ = unix.Close(fd) }
		}
	}
}
