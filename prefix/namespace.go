package prefix

import (
	"encoding/binary"

	"github.com/kvferry/kvferry/page"
)

// Namespace is everything outside the prompt that decides the bytes of a page, or
// who may read them. Two namespaces that differ in any field have no key in
// common. The rank of an engine is not part of it: it names a part of an entry.
type Namespace struct {
	Tenant   string   // whose pages they are; nobody else matches them
	Model    string   // its name
	Digest   []byte   // of the weights and the configuration
	Adapters []string // names or digests of the adapters, in the order in which they apply

	DType  string // of the elements of the cache
	Scales []byte // digest of the quantization scales; empty when there are none

	PageSize   int    // tokens a page
	Layers     int    // of the whole model
	Layout     string // order of the axes inside a page
	HashScheme string // how keys are made; SchemeTokens or SchemeIDs for those of this package
	Salt       string // anything else that must keep pages apart
}

// The hash schemes of this package.
const (
	SchemeTokens = "kvferry-tokens-1" // Next
	SchemeIDs    = "kvferry-ids-1"    // NextID and NextIDPart
)

// Root returns the key before the first page of every prompt in the namespace.
func (n Namespace) Root() page.Key {
	var adapters []byte
	for _, a := range n.Adapters {
		adapters = appendField(adapters, []byte(a))
	}
	var pageSize, layers [8]byte
	binary.LittleEndian.PutUint64(pageSize[:], uint64(n.PageSize))
	binary.LittleEndian.PutUint64(layers[:], uint64(n.Layers))
	return Fingerprint(
		[]byte("kvferry namespace 1"),
		[]byte(n.Tenant), []byte(n.Model), n.Digest, adapters,
		[]byte(n.DType), n.Scales,
		pageSize[:], layers[:], []byte(n.Layout), []byte(n.HashScheme),
		[]byte(n.Salt),
	)
}
