package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/transfer"
	"github.com/kvferry/kvferry/fault"
)

// The exit statuses. `kvferry help exit` lists them.
const (
	exitOK        = 0
	exitWrongByte = 1
	exitUsage     = 2
	exitMemory    = 3
	exitDevice    = 4
	exitOther     = 5
	exitPeer      = 6
	exitInterrupt = 130 // 128 + SIGINT, as shells have it
)

// exitStatus maps an error to the exit status of the process.
func exitStatus(err error) int {
	if err == nil {
		return exitOK
	}
	kind := fault.KindOf(err)
	if errors.Is(err, context.Canceled) && kind != fault.Corrupt { // a wrong byte is said whatever else is
		return exitInterrupt
	}
	if _, ok := errors.AsType[*transfer.PeerError](err); ok && kind != fault.Corrupt {
		return exitPeer
	}
	switch kind {
	case fault.Corrupt:
		return exitWrongByte
	case fault.Invalid, fault.NotFound, fault.Exists, fault.Unsupported:
		return exitUsage
	case fault.Memory, fault.Full:
		return exitMemory
	case fault.Device:
		return exitDevice
	case fault.Busy, fault.Closed:
		return exitOther
	}
	return exitOther
}

// newExitTopic returns a help topic: a command that only has a long text.
func newExitTopic() *cobra.Command {
	return &cobra.Command{
		Use:   "exit",
		Short: "What the exit status says",
		Long: `The exit status of every verb:

  0    all right
  1    a wrong byte: what came back is not what was written, or the books do not balance
  2    bad use or bad input: a flag, a configuration, a trace, a key
  3    not enough memory
  4    a device or its driver failed
  5    anything else: the answer could not be written, or a bug in kvferry
  6    another process: it has gone, refused, ended its lease, or did not answer in time; try again, or publish again
  130  interrupted

A program made with Go that crashes ends with 2 as well; it then prints "panic" or "fatal error" rather than
"kvferry: error", and is a bug in kvferry.`,
	}
}
