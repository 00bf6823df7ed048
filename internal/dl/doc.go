// Package dl calls C libraries that are opened at run time, in builds without cgo.
//
// A [Library] is a value: two may be open at once, a test's fake beside the real
// one, and nothing of either is a package variable. purego opens it and finds its
// symbols; calls take a path of our own, because they are on the hot path of every
// copy: a trampoline over runtime.cgocall, which puts up to 14 words into registers
// and onto the stack as the C ABI of the machine says, and allocates nothing.
//
// # Rules of memory
//
// No Go memory reaches C. Go moves stacks, and frees or reuses what it believes to
// be unused while a queue of some device still reads it; none of that is found by a
// test, except by luck. Structs, arrays and words that C fills in lie in a [Block],
// which is mapped outside the heap and is handed over as an address. Whoever shares a
// Block between goroutines orders their use of it.
//
// # Traps
//
//   - A callback is no [Func]: C must not call back into Go from a call that was made
//     here. Nothing in kvferry registers one.
//   - Much of what drivers know is kept per OS thread. Calls that belong together are
//     made between runtime.LockOSThread and UnlockOSThread.
//   - A call that blocks keeps its OS thread, as any call into the kernel does; the
//     Go scheduler starts another.
//   - Opening a library makes the whole program dynamic (it needs libc). With `-tags
//     nogpu` nothing is linked, and Open says that it can't.
//   - Libraries stay open: vendors' libraries do not survive being closed.
package dl
