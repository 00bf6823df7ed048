// Command kvferry moves the pages of a KV cache between memories, and shows how.
//
// One file a verb: a verb turns flags into the options of a package and does
// nothing else. Everything that is said goes to standard output; what went wrong,
// and progress on a terminal, to standard error.
package main

import "os"

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}
