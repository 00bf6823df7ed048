package fakedriver

import "testing"

// modes calls f with each mode.
func modes(t *testing.T, o Options, f func(t *testing.T, r *rig)) {
	for _, m := range []Mode{Random, Eager, Lazy} {
		t.Run(m.String(), func(t *testing.T) {
			o.Mode = m
			f(t, newRig(t, o))
		})
	}
}

func TestLinearRoundTrip(t *testing.T) {
	versions(t, func(t *testing.T, o Options) {
		modes(t, o, func(t *testing.T, r *rig) {
			const n = 100_000
			h, d, s := r.host(2*n), r.alloc(n), r.newStream()
			noise(h[:n], 1)
			r.copy(d, addr(h), n, s)
			r.copy(addr(h)+n, d, n, s)
			r.sync(s)
			same(t, "round trip", h[n:], h[:n])
		})
	})
}
