// Package invariants says whether this build checks what must always hold, at
// the price of speed. Such builds are made with `-tags invariants` and by the
// race detector. The checks themselves live beside the code that they check,
// behind `if invariants.Enabled`, which costs nothing in other builds.
package invariants

// Poison fills bytes that nobody may read at this moment: the destination of a
// copy that has not run. It is neither zero nor likely as the byte of a page,
// so that reading too early is seen.
const Poison byte = 0xDE
