// Package handoff hands memory from one process to others of the same host, over a Unix
// socket: one hello with file descriptors, and small frames both ways as long as the
// connection lasts.
//
// # Who may connect
//
// The socket lies in a directory that only its owner can enter, and has a random name.
// Both sides look at the credentials that the kernel keeps of the other one, and go on
// only with their own user or one that they were told to trust. A pidfd says whether the
// other process lives, without asking it anything.
//
// # What is said
//
// The listener speaks first. Packets are those of SOCK_SEQPACKET, so none arrives in
// part; all numbers are little-endian:
//
//	hello   "KVFH"  version u16  status u16  payload u32  descriptors u32
//	        then, until both are complete: number u32 | at most 32 KiB of the payload,
//	        with at most 253 descriptors
//	frame   version u8  kind u8  0 u16  word u32  count u64
//
// A status other than 0 is a refusal, and ends the connection. What a descriptor is and
// what the payload says is up to who uses this package.
//
// # Traps
//
//   - Nothing in a payload or a frame names a process: [Conn.Peer] is what the kernel says.
//   - A descriptor from elsewhere is anything at all until it was looked at: [CheckSealed].
//     A file that can be cut shorter under a mapping is a crash of whoever reads it.
//   - Descriptors that were received are the receiver's: [Hello.Close] closes them.
package handoff
