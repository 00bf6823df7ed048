package tcp

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/fault"
)

// The bytes of an offer: version u8, flags u8, then the address, "host:port", to the end.
const (
	offerVersion = 1
	offerTLS     = 1 << 0

	maxAddressBytes = 253 + 1 + 5 // a name, a colon, a port
)

func newOffer(address string, tls bool) []byte {
	flags := byte(0)
	if tls {
		flags |= offerTLS
	}
	return append([]byte{offerVersion, flags}, address...)
}

// decodeOffer is the inverse of newOffer, for bytes from anybody. Kinds: fault.Invalid,
// fault.Unsupported (another version).
func decodeOffer(b []byte) (address string, tls bool, err error) {
	switch {
	case len(b) < 2:
		return "", false, fault.New(fault.Invalid, "offer", "truncated: %d bytes", len(b))
	case b[0] != offerVersion:
		return "", false, fault.New(fault.Unsupported, "offer", "version %d, and this build knows %d", b[0], offerVersion).
			Hint("run the same version of kvferry on both sides")
	case b[1]&^offerTLS != 0:
		return "", false, fault.New(fault.Invalid, "offer", "flags %#x are not known", b[1]&^offerTLS)
	case len(b)-2 > maxAddressBytes:
		return "", false, fault.New(fault.Invalid, "offer", "an address of %d bytes, and the longest has %d", len(b)-2, maxAddressBytes)
	}
	address = string(b[2:])
	return address, b[1]&offerTLS != 0, checkPeer(address)
}

// checkPeer refuses what is not the address of one host and a port. Kind: fault.Invalid.
func checkPeer(address string) error {
	host, port, err := checkAddress(address)
	if err != nil {
		return err
	}
	if port == 0 {
		return fault.New(fault.Invalid, "address", "%q has no port", address)
	}
	return checkHost(address, host)
}

// checkListen refuses to listen on more than one address. Kind: fault.Invalid.
func checkListen(address string) (host string, err error) {
	host, _, err = checkAddress(address)
	if err != nil {
		return "", err
	}
	return host, checkHost(address, host)
}

func checkAddress(address string) (host string, port int, err error) {
	if len(address) > maxAddressBytes {
		return "", 0, fault.New(fault.Invalid, "address", "%d bytes, and the longest has %d", len(address), maxAddressBytes)
	}
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, fault.New(fault.Invalid, "address", "%q is not host:port", address)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || strconv.FormatUint(n, 10) != text {
		return "", 0, fault.New(fault.Invalid, "address", "%q: port %q is not a number below 65536", address, text)
	}
	return host, int(n), nil
}

func checkHost(address, host string) error {
	if host == "" {
		return errWildcard(address)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return checkIP(address, ip)
	}
	// A name. What only looks like an address ("0", "0x7f.1") some resolvers take for one.
	named := false
	for _, c := range []byte(host) {
		letter := 'a' <= c|0x20 && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && strings.IndexByte("-._", c) < 0 {
			return fault.New(fault.Invalid, "address", "%q has no name of a host in it", address)
		}
		named = named || letter
	}
	last := strings.TrimSuffix(host, ".")
	last = last[strings.LastIndexByte(last, '.')+1:]
	if !named || last == "" || '0' <= last[0] && last[0] <= '9' {
		return fault.New(fault.Invalid, "address", "%q has no name of a host in it", address)
	}
	return nil
}

func checkIP(address string, ip netip.Addr) error {
	switch ip = ip.Unmap().WithZone(""); {
	case ip.IsUnspecified():
		return errWildcard(address)
	case ip.IsMulticast() || ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fault.New(fault.Invalid, "address", "%q is of more than one host", address)
	}
	return nil
}

func errWildcard(address string) error {
	return fault.New(fault.Invalid, "address", "%q stands for all addresses of a host", address).
		Hint("name one: 127.0.0.1, or that of the network that readers are on")
}

// checkConnected refuses a connection whose ends a name has led somewhere else.
func checkConnected(address string, a net.Addr) error {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return fault.New(fault.Invalid, "address", "%q is not one of TCP", address)
	}
	return checkIP(address, t.AddrPort().Addr())
}
