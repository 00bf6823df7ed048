// Package e2e tests kvferry against real peers: programs of others that it must work
// with. They are fetched by the script fetch, by their hashes; there is no stand-in for
// one that is missing.
package e2e
