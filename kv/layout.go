package kv

import "github.com/kvferry/kvferry/fault"

// Layout is the order of the axes inside a page of one plane. The zero value is
// no layout: legal only where no plane has rows of K, V or latents.
type Layout uint8

// The layouts.
const (
	NHD Layout = iota + 1 // [tokens, heads, dim]
	HND                   // [heads, tokens, dim]
	MLA                   // [tokens, latent]: one latent row instead of K and V
)

var layoutNames = []string{"none", "NHD", "HND", "MLA"}

func (l Layout) String() string { return nameOf(layoutNames, "layout", int(l)) }

// ParseLayout returns the layout of that name, in any case.
// Kind: fault.Invalid.
func ParseLayout(name string) (Layout, error) {
	i, err := parseName(layoutNames, "layout", name)
	return Layout(i), err
}

// PlaneKind says what the bytes of a plane are.
type PlaneKind uint8

// The kinds of plane. Rows of K, V, KV and Latent planes can be addressed token
// by token. A Scale plane can when it has a token stride. State and Opaque
// planes move as whole pages only.
const (
	K      PlaneKind = iota + 1 // rows of K, heads × dim elements a token
	V                           // rows of V
	KV                          // rows of K and V in one plane, KVStride apart
	Latent                      // MLA rows, dim elements a token
	Scale                       // quantisation scales
	State                       // recurrent state, not made of tokens
	Opaque                      // bytes of unknown order
)

var kindNames = []string{"none", "K", "V", "KV", "latent", "scale", "state", "opaque"}

func (k PlaneKind) String() string { return nameOf(kindNames, "plane kind", int(k)) }

// Join says how the K and the V of a page lie to each other.
type Join uint8

// The ways to join K and V. In both joined ones a page has one plane of them.
const (
	Apart      Join = iota // all of K, then all of V: two planes
	JoinRows               // a row of K, then its row of V: NHD [tokens, heads, 2, dim], HND [heads, tokens, 2, dim]
	JoinBlocks             // one axis further out: NHD [tokens, 2, heads, dim], HND [heads, 2, tokens, dim]
)

// ScalePer says what has a quantisation scale of its own.
type ScalePer uint8

// What can have a scale. Each is one for K and one for V, or one for a latent.
const (
	NoScale      ScalePer = iota
	PerPage               // moves with whole pages only
	PerHead               // a head of a page: likewise
	PerToken              // all heads of a token
	PerTokenHead          // a head of a token, in the order of the layout
)

// hasRows reports whether the plane's elements can be addressed by token, head
// and dimension.
func (k PlaneKind) hasRows() bool { return K <= k && k <= Latent }

// valid reports whether k is in the list.
func (k PlaneKind) valid() bool { return K <= k && k <= Opaque }

func unknown(what string, got any, names []string) error {
	return fault.New(fault.Invalid, what, "%v is not known", got).Hint("use one of %v", names[1:])
}
