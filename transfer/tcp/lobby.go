package tcp

import (
	"net"
	"net/netip"
	"slices"

	"github.com/kvferry/kvferry/fault"
)

// lobby has the connections that have not opened an owner yet, the oldest first. Anybody
// who reaches the listener is in it, so there is no waiting for a place: when it is full,
// one has to go. It is the oldest of the network that has the most. So strangers of one
// network turn out each other, and nobody else, however fast they come; and those of many
// have to come faster than a reader takes to open.
type lobby struct {
	all []guest
}

type guest struct {
	conn    net.Conn
	network netip.Prefix
}

// add adds a connection, and returns the one that has to go, nil when there is room.
func (l *lobby) add(c net.Conn) (out net.Conn) {
	if len(l.all) >= maxWaiting {
		i := l.crowded()
		out = l.all[i].conn
		l.all = slices.Delete(l.all, i, i+1)
	}
	l.all = append(l.all, guest{c, networkOf(c.RemoteAddr())})
	return out
}

// crowded returns the oldest of the network that has the most.
func (l *lobby) crowded() (first int) {
	most := 0
	counts := make(map[netip.Prefix]int, len(l.all))
	for _, g := range l.all {
		counts[g.network]++
		most = max(most, counts[g.network])
	}
	return slices.IndexFunc(l.all, func(g guest) bool { return counts[g.network] == most })
}

// remove reports whether c was there still.
func (l *lobby) remove(c net.Conn) bool {
	i := slices.IndexFunc(l.all, func(g guest) bool { return g.conn == c })
	if i < 0 {
		return false
	}
	l.all = slices.Delete(l.all, i, i+1)
	return true
}

// networkOf is the address of whoever connects, or what he has as many addresses of as he
// likes.
func networkOf(a net.Addr) netip.Prefix {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := t.AddrPort().Addr().Unmap().WithZone("")
	bits := 32
	if ip.Is6() {
		bits = 64
	}
	network, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return network
}

func errTurnedOut() error {
	return fault.New(fault.Full, "connections", "%d others came before it had opened an owner", maxWaiting)
}
