package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// Two sides that have one key, made once and given to both of them.
func Example() {
	dir, err := os.MkdirTemp("", "kvferry")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "key")
	if err := tcp.NewKeyFile(file); err != nil {
		panic(err)
	}
	key, err := tcp.ReadKeyFile(file)
	if err != nil {
		panic(err)
	}

	// One that others read from; port 0 is any that is free.
	owner, err := tcp.New(tcp.Options{Key: key, Listen: "127.0.0.1:0", TLS: true})
	if err != nil {
		panic(err)
	}
	defer owner.Close() // after the publisher that it is given to
	fmt.Println(owner.Name(), owner.Addr() != "")

	// One that reads only: it listens nowhere.
	reader, err := tcp.New(tcp.Options{Key: key, TLS: true})
	if err != nil {
		panic(err)
	}
	defer reader.Close() // after the reader that it is given to
	fmt.Println(reader.Addr() == "")

	// Nobody listens on all addresses by accident.
	_, err = tcp.New(tcp.Options{Key: key, Listen: ":7000"})
	fmt.Println(errors.Is(err, fault.Invalid), fault.RemedyOf(err))

	// Does it work here?
	_, err = tcp.Check(context.Background(), tcp.Options{})
	fmt.Println(err)
	// Output:
	// tcp true
	// true
	// true name one: 127.0.0.1, or that of the network that readers are on
	// <nil>
}
