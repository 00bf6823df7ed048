// Package tcp reads pages of owners on other hosts, over TCP. It is the engine that needs
// nothing installed.
//
// # Who may read
//
// An owner listens on an address that it was given, never on all of them, and lets read
// who proves that it has the key that both sides share: then any page of the caches that
// are offered, for the descriptor is not a secret and is no permission. The two sides
// challenge each other before anything else is said (see [Options.Key]), so a reader
// doesn't take pages from somebody else either.
//
// The proof is about the beginning of a connection. On a network that others can write
// to, take TLS, which keeps what follows as well: TLS 1.3, with certificates that last as
// long as the engine and that nobody has to issue, because the proofs cover the keys of
// the very connection that they are sent on. Who sits in between is seen. A side with TLS
// never speaks without it.
//
// # What moves
//
// A read is one request for a list of pages, spread over a few connections by bytes. The
// pages come one after the other: their layers by global id, in each its planes by kind,
// in each plane the stretches that [kv.Geometry.Chunks] has. Both sides derive this order
// from what is equal in their geometries, and address their own memory by their own. The
// bytes come in segments, each with its xxh3-128 unless [Options.Unchecked] is set:
// written from the owner's pages and read into the reader's with no copy in between where
// stretches are long enough, and through a buffer of one segment where they are not, or
// where TLS needs one.
//
// # Traps
//
//   - The address in an offer is a claim. To connect to it is all that follows from it;
//     what is there has to prove that it has the key.
//   - Sums find what broke on its way. They are no proof against an adversary: TLS is.
//   - A page that its owner overwrites while it is sent has a sum that is wrong. When the
//     epoch moved as well, that is why.
//   - Pages of an accelerator are not read from: offload them to a pool of host memory,
//     and publish that.
package tcp
