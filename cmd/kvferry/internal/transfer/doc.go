// Package transfer is what kvferry transfer does: serve publishes a cache whose pages are
// filled by a seed, and read, in another process or on another host, reads them and
// compares every byte with what the seed says. Beside each other they show that two
// machines can exchange pages, by which engine, and how fast.
package transfer
