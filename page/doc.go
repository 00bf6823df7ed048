// Package page says whose each page of a cache is. It knows numbers only: not a
// byte of a page passes through it, and where the bytes lie is the business of
// package kv.
//
//   - [ID], [Key], [Pair] and [Run] are the words everybody above shares, and
//     [AppendRuns] turns pairs into the runs that copies are made of.
//   - [Allocator] hands out free pages, all that were asked for or none.
//   - [Arena] is an allocator that also counts owners and seals pages, for caches
//     whose pages are shared.
//
// # Runs
//
// One copy moves a run, however long it is, so pages that are adjacent are worth
// more than pages that are not. Free pages are therefore kept as runs, as a
// memory allocator keeps its blocks: the length of each free run is written at
// its first and at its last page (so a page that comes back finds its neighbours
// in O(1)), and runs of like length are linked into one list, so the smallest run
// that is long enough is found without a search. With [FIFO] none of that is
// kept: ids leave in the order in which they came back.
//
// # States of a page
//
// A page of an arena is in one of four states, and no call leads anywhere else:
//
//	free              no owner, not sealed: on the free list
//	private           one owner, not sealed: its owner may write it
//	sealed            one owner, sealed: never written again
//	shared            several owners, sealed
//
//	free    → private   Acquire, TryAcquire
//	private → sealed    Seal
//	sealed  → shared    Retain
//	shared  → shared    Retain, Release, while more than one owner is left
//	shared  → sealed    Release, by the last owner but one
//	private → free      Release
//	sealed  → free      Release: the seal goes with the last owner
//
// Sealing twice changes nothing. The sink page, where there is one, is private to
// the arena for ever. A page under a copy in flight is simply not released: the
// arena knows nothing of copies, so whoever started one keeps its ownership until
// the ticket is done.
//
// # Memory and locks
//
// All books are made at construction, for as many pages as the pool may ever
// grow to (about 13 bytes a page, 5 more in an arena); taking and giving back
// pages allocates nothing, and results are appended to a slice of the caller's.
//
// An allocator and an arena have one lock each, held for one call and never while
// anything else is called, so callers may hold locks of their own. The one
// exception is the function given to [Arena.Check]: it runs under the arena's
// lock and must not call the arena.
//
// # Traps
//
// A number read from NumFree or LargestRun can be old by the time it is looked
// at: to decide whether there is room, ask for the pages. An id is only a number:
// a holder that uses it after its release reads somebody else's page, and nothing
// here can tell.
package page
