// Package prefix makes the keys of pages. Equal keys must mean equal bytes, so a
// key covers all that decides the bytes of a page: the key of the page before it
// (and so everything before it), what is on the page, and at the root of the
// chain everything that holds for all pages of a model (see [Namespace]).
//
// # Encoding
//
// A key is the SHA-256 of a list of fields, each preceded by its length in 4
// bytes. All numbers are little-endian. Such a list can be read back in one way
// only, so different contents never encode to the same bytes:
//
//	Fingerprint(f1, f2, …)    f1, f2, …
//	Next(prev, tokens, items) prev; tokens, 4 bytes each; items, each its start,
//	                          offset and length, 4 bytes each, and its digest
//	                          preceded by its length
//	NextID(prev, id)          prev; id, 8 bytes
//	NextIDPart(prev, id, n)   prev; id, 8 bytes, and n, 4 bytes
//
// Keys are written to disk and sent to other hosts, so this never changes: another
// encoding is another hash scheme, which the namespace names. Golden vectors made
// by another program are in testdata.
//
// # Traps
//
// A key made elsewhere ([Given]) covers what its maker chose to cover. If that
// does not include the model or the tenant, put it under a namespace:
// Fingerprint(root[:], key[:]).
//
// All functions are pure and may be called from any goroutine.
package prefix

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/page"
)

// Item is an input on a page that is not tokens, such as an image or audio. It
// is part of the key of every page that it touches, each time with its whole
// length and digest, because attention inside an item looks forward too.
type Item struct {
	Start  uint32 // the first of its slots on this page
	Offset uint32 // how many of its slots are on earlier pages
	Length uint32 // how many slots it has in all
	Digest []byte // names its contents, and how they were encoded
}

// Fingerprint returns the SHA-256 of the fields, each preceded by its length.
func Fingerprint(fields ...[]byte) page.Key {
	var stack [512]byte
	buf := stack[:0]
	for _, f := range fields {
		buf = appendField(buf, f)
	}
	return sha256.Sum256(buf)
}

// Next returns the key of the page that follows prev and holds tokens and items.
func Next(prev page.Key, tokens []uint32, items []Item) page.Key {
	var stack [2560]byte // a page of 512 tokens with an item or two
	return sha256.Sum256(appendPage(stack[:0], prev, tokens, items))
}

// AppendChain appends to keys those of the whole pages that tokens fill, from
// root on: len(tokens) / pageSize of them. What is left over has no key, and with
// a pageSize below 1 nothing has.
func AppendChain(keys []page.Key, root page.Key, tokens []uint32, pageSize int) []page.Key {
	if pageSize < 1 {
		return keys
	}
	for prev := root; len(tokens) >= pageSize; tokens = tokens[pageSize:] {
		prev = Next(prev, tokens[:pageSize], nil)
		keys = append(keys, prev)
	}
	return keys
}

// NextID returns the key of the page that follows prev and whose contents have
// the number id, such as a page of a trace. The bytes hashed fill one block of
// SHA-256.
func NextID(prev page.Key, id uint64) page.Key {
	var buf [lenSize + len(prev) + lenSize + 8]byte
	putIDFields(buf[:], &prev, 8)
	binary.LittleEndian.PutUint64(buf[2*lenSize+len(prev):], id)
	return sha256.Sum256(buf[:])
}

// NextIDPart is NextID for a page that holds one part of what id numbers, counted
// from 0. It, too, hashes one block.
func NextIDPart(prev page.Key, id uint64, part uint32) page.Key {
	var buf [lenSize + len(prev) + lenSize + 12]byte
	putIDFields(buf[:], &prev, 12)
	binary.LittleEndian.PutUint64(buf[2*lenSize+len(prev):], id)
	binary.LittleEndian.PutUint32(buf[2*lenSize+len(prev)+8:], part)
	return sha256.Sum256(buf[:])
}

// putIDFields writes prev and the length of the field after it.
func putIDFields(buf []byte, prev *page.Key, length uint32) {
	binary.LittleEndian.PutUint32(buf, uint32(len(prev)))
	copy(buf[lenSize:], prev[:])
	binary.LittleEndian.PutUint32(buf[lenSize+len(prev):], length)
}

// Given returns the key that another program made. 32 bytes are taken as they
// are. 8 to 31 bytes are filled up with zeros, and the last byte says how many
// they were, so no two of them are confused; a 32-byte key can look like one of
// those, so one namespace should hold keys of one length. Other lengths are
// refused (fault.Invalid): fewer bytes cannot name contents.
func Given(b []byte) (page.Key, error) {
	var k page.Key
	if len(b) < 8 || len(b) > len(k) {
		return k, fault.New(fault.Invalid, "key", "%d bytes are not in 8 to %d", len(b), len(k)).
			Hint("a longer key can be shortened with a hash, such as prefix.Fingerprint")
	}
	copy(k[:], b)
	if len(b) < len(k) {
		k[len(k)-1] = byte(len(b))
	}
	return k, nil
}

// lenSize is the size of the length before a field.
const lenSize = 4

func appendPage(buf []byte, prev page.Key, tokens []uint32, items []Item) []byte {
	buf = appendField(buf, prev[:])
	buf = appendLen(buf, 4*len(tokens))
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	size := 0
	for _, it := range items {
		size += 3*4 + lenSize + len(it.Digest)
	}
	buf = appendLen(buf, size)
	for _, it := range items {
		buf = binary.LittleEndian.AppendUint32(buf, it.Start)
		buf = binary.LittleEndian.AppendUint32(buf, it.Offset)
		buf = binary.LittleEndian.AppendUint32(buf, it.Length)
		buf = appendField(buf, it.Digest)
	}
	return buf
}

func appendField(buf, field []byte) []byte {
	return append(appendLen(buf, len(field)), field...)
}

// appendLen appends the length of a field. Fields are far below 4 GiB: a page
// has thousands of tokens, not a thousand million.
func appendLen(buf []byte, n int) []byte {
	return binary.LittleEndian.AppendUint32(buf, uint32(n))
}
