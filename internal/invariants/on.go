//go:build invariants || race

package invariants

// Enabled is true when this build checks invariants.
const Enabled = true
