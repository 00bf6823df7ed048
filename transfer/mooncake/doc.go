// Package mooncake reads caches of other owners by Mooncake's transfer engine: a C
// library that is opened when it is there (package dl), and that a fleet may use already.
//
// It crashes when it is misused, it takes signals, and nothing that it has begun can be
// called back. So by default it runs in a child process ([Serve]), which maps the memfds
// of this process's caches and does what frames on a socket tell it. The child of an
// owner serves all offers of an engine. Each owner that is read from has a child of its
// own: what ends one is felt by nobody else.
//
// # What a read is
//
// Rows of pages that follow each other on both sides are one request, of at most 1 MiB.
// Requests go in batches of 128, at most six batches to one owner, for the library fails
// what is beyond 1024. A batch is polled until the library gives it back; a read is over
// when all of its batches are, and not before, whatever else has happened.
//
//   - When a read's context ends, no more is submitted. What is in flight ends by itself,
//     or the child is killed: then it is over too. Either way nothing writes the pages.
//   - A child that dies fails what it was at, when it has been waited for, with what it
//     said last. The next use starts another, less often when they keep dying.
//   - In this process there is no such way out: a read ends when the library gives up an
//     owner that stands still, which takes it Options.Stall for each request that waits on
//     one of its eight connections. Batches are of 16 there, so it is four times that for
//     one read. Its pages are in quarantine until then.
//
// # Who can read what
//
// Mooncake's ports ask nobody who they are. What is offered can be read by everybody who
// reaches them, so that it is offered at a named address only, with a warning. It can't be
// written: the library sees it by a mapping for reading only. The pages of a reader are
// out of reach, for over TCP they are not registered at all. With RDMA both are different:
// use it on a network that is yours.
//
// Epoch words are read as pages are, and together with a header that says whose they are:
// what listens at an address may be somebody else by then.
//
// # Traps
//
//   - The addresses of an offer are those of the owner's child, and only a remote operand
//     here: reads are bounded by the regions of the offer, and by the geometry.
//   - The library unregisters memory without waiting for who reads it. What is withdrawn
//     is replaced under its addresses, which nothing else gets before the engine closes.
//   - Its numbers for owners are never given back, and neither are its threads before the
//     engine closes.
//   - It looks for free ports and takes them later. When somebody else was quicker it ends
//     its process: a child is started again, this process is gone. Engines of kvferry's on
//     one host take turns; other programs that use the library don't.
//   - A metadata scheme that the library was built without ends its process.
package mooncake
