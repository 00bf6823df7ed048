package mooncake

import (
	"net"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry/fault"
)

const (
	peerToPeer   = "P2PHANDSHAKE" // metadata: engines ask each other
	protocolTCP  = "tcp"
	protocolRDMA = "rdma"

	logLevel = "MC_LOG_LEVEL" // which the site may set

	maxMetadata = 1024
	maxName     = 255
)

// environ returns the environment of the library: base with what it must have, and
// without what must not be there. The site's other settings stay. ipv6 says that peers
// have such addresses.
func environ(base []string, o *Options, ipv6 bool) []string {
	force := map[string]string{
		// Without it the build for Ascend starts a transport that needs Ascend's libraries.
		"MC_FORCE_TCP":                "1",
		"MC_TCP_BIND_ADDRESS":         o.host(),
		"MC_TCP_PROGRESS_TIMEOUT_SEC": seconds(o.Stall),
		"MC_TCP_STATUS_TIMEOUT_SEC":   seconds(o.Stall),
		// Otherwise each request opens a connection.
		"MC_TCP_ENABLE_CONNECTION_POOL": "1",
		"MC_TCP_SLICE_SIZE":             strconv.Itoa(sliceBytes),
		"MC_TCP_LANES_PER_PEER":         strconv.Itoa(lanes),
		// Of either framing only the one that is acknowledged; of either engine the one
		// that is bound here.
		"MC_TCP_PROTO": "", "MC_USE_TENT": "", "MC_USE_TEV1": "", "MC_USE_IPV6": "",
	}
	if ipv6 { // without it owners there are not reached, and with it there must be IPv6
		force["MC_USE_IPV6"] = "1"
	}
	if o.Protocol == protocolRDMA {
		force["MC_FORCE_TCP"] = ""
	}
	quiet := true
	for _, s := range base {
		quiet = quiet && !strings.HasPrefix(s, logLevel+"=")
	}
	if quiet {
		force[logLevel] = "WARNING"
	}
	env := slices.DeleteFunc(slices.Clone(base), func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		_, forced := force[name]
		return forced
	})
	names := make([]string, 0, len(force))
	for name, value := range force {
		if value != "" {
			names = append(names, name+"="+value)
		}
	}
	slices.Sort(names)
	return append(env, names...)
}

// setEnviron makes environ this process's own, for a library that is in it.
func setEnviron(o *Options) error {
	want := map[string]string{}
	for _, s := range environ(os.Environ(), o, isIPv6(o.Listen)) {
		if name, value, _ := strings.Cut(s, "="); strings.HasPrefix(name, "MC_") {
			want[name] = value
		}
	}
	for _, name := range []string{"MC_FORCE_TCP", "MC_TCP_PROTO", "MC_USE_TENT", "MC_USE_TEV1", "MC_USE_IPV6"} {
		if want[name] == "" {
			if err := os.Unsetenv(name); err != nil {
				return err
			}
		}
	}
	for name, value := range want {
		if os.Getenv(name) == value {
			continue // the library of another engine here may be reading
		}
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	return nil
}

// isIPv6 says whether a host, or a host with a port, is an address of that family.
func isIPv6(s string) bool {
	if host, _, err := net.SplitHostPort(s); err == nil {
		s = host
	}
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6() && !a.Is4In6()
}

func seconds(d time.Duration) string {
	return strconv.Itoa(max(1, int(d.Round(time.Second)/time.Second)))
}

// checkMetadata refuses what ends the process that gives it to the library: a scheme
// that it was built without. Kind: fault.Invalid.
func checkMetadata(s string) error {
	if s == peerToPeer {
		return nil
	}
	u, err := url.Parse(s)
	if err != nil || len(s) > maxMetadata || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fault.New(fault.Invalid, "Metadata", "%.80q is neither %s nor the address of an HTTP server", s, peerToPeer).
			Hint("use %s; etcd and Redis are not supported", peerToPeer)
	}
	return nil
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$`)

// checkSegment refuses what can't be the name of an owner: host and port where owners
// are asked themselves, else any name of letters. It comes from outside.
// Kind: fault.Invalid.
func checkSegment(name, metadata string) error {
	bad := fault.New(fault.Invalid, "offer", "%.80q names no owner", name)
	if len(name) == 0 || len(name) > maxName {
		return bad
	}
	if metadata != peerToPeer {
		if !hostName.MatchString(name) {
			return bad
		}
		return nil
	}
	host, port, err := net.SplitHostPort(name)
	if err != nil {
		return bad
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return bad
	}
	// The zone of an address can be any text.
	if a, err := netip.ParseAddr(host); err == nil && (a.Zone() == "" || hostName.MatchString(a.Zone())) || hostName.MatchString(host) {
		return nil
	}
	return bad
}

// withPort is the name of an engine that was to be called name, and listens on a port of
// its own choice. It tells that behind an address of any family, which is not used.
func withPort(name, told string) (string, error) {
	host, _, err := net.SplitHostPort(name)
	if err != nil {
		return "", fault.Wrap(fault.Invalid, "mooncake engine", err)
	}
	i := strings.LastIndexByte(told, ':')
	n, err := strconv.ParseUint(told[i+1:], 10, 16)
	if i < 0 || err != nil || n == 0 {
		return "", fault.New(fault.Device, "mooncake engine", "calls itself %.80q, which has no port", told)
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}
