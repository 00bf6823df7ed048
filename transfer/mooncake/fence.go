package mooncake

import (
	"encoding/binary"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// The library listens on all addresses of the host, whatever it is told. In a child every
// socket that listens is its own, so there the kernel is told to drop what is sent to
// other addresses than the one that was named.

// fence has all TCP sockets of this process that listen, and those that were accepted
// already, take packets for addr only; for the zero address, none at all. Kind:
// fault.Unsupported.
func fence(addr netip.Addr) error {
	program := admit(addr)
	listening := map[int]bool{} // ports
	// Listeners first: what they accept from then on is fenced too.
	for _, listeners := range []bool{true, false} {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return fault.Wrap(fault.Unsupported, "mooncake: sockets", err).Hint("mount /proc")
		}
		for _, e := range fds {
			fd, err := strconv.Atoi(e.Name())
			if err != nil {
				continue
			}
			port, listens, ok := tcpSocket(fd)
			if !ok || listens != listeners || !listens && !listening[port] {
				continue
			}
			listening[port] = true
			p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
			if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &p); err != nil {
				return fault.Wrap(fault.Unsupported, "mooncake: its ports can't be kept to "+addr.String(), err)
			}
		}
	}
	return nil
}

// tcpSocket looks at a descriptor: ok says that it is a TCP socket, with a port here.
func tcpSocket(fd int) (port int, listens, ok bool) {
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || protocol != unix.IPPROTO_TCP {
		return 0, false, false
	}
	accepts, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return 0, false, false
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return 0, false, false
	}
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		port = a.Port
	case *unix.SockaddrInet6:
		port = a.Port
	default:
		return 0, false, false
	}
	return port, accepts != 0, port != 0
}

// admit is the program of a socket filter that passes packets for addr, and drops others.
func admit(addr netip.Addr) []unix.SockFilter {
	const (
		protocol = 0xfffff000 // SKF_AD_OFF + SKF_AD_PROTOCOL
		network  = 0xfff00000 // SKF_NET_OFF: the header of IP
		load     = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal    = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret      = unix.BPF_RET | unix.BPF_K
	)
	var program []unix.SockFilter
	check := func(at, want uint32) {
		program = append(program, unix.SockFilter{Code: load, K: at}, unix.SockFilter{Code: equal, K: want})
	}
	switch addr = addr.Unmap(); {
	case addr.Is4():
		b := addr.As4()
		check(protocol, unix.ETH_P_IP)
		check(network+16, binary.BigEndian.Uint32(b[:]))
	case addr.Is6():
		b := addr.As16()
		check(protocol, unix.ETH_P_IPV6)
		for i := 0; i < len(b); i += 4 {
			check(network+24+uint32(i), binary.BigEndian.Uint32(b[i:]))
		}
	default:
		return []unix.SockFilter{{Code: ret, K: 0}}
	}
	for i := range program {
		if program[i].Code == equal { // what differs goes to the last instruction
			program[i].Jf = uint8(len(program) - i)
		}
	}
	return append(program, unix.SockFilter{Code: ret, K: 0xffffffff}, unix.SockFilter{Code: ret, K: 0})
}
