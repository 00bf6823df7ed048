package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/doctor"
)

func newDoctor() *cobra.Command {
	var o doctor.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what of this machine works, and what is in the way",
		Long: `Looks at this machine as kvferry will use it: memory and its limits, what processes may share, Python engines,
which engines can transfer pages here and why not the others, devices with their drivers and libraries, which copier
was chosen and why the others were not, and how fast copies go. Run it first on a new node, and send what it says with
a bug report.

A green line is well. A yellow one works, but less than it could; a red one does not work although it is there, or was
asked for. Both have a remedy. Only red makes the exit status other than 0.

It takes up to 30 seconds, mostly one or two, and changes nothing: libraries of a vendor whose driver is not there are
not started, unless they are named here.`,
		Example: "  kvferry doctor\n  kvferry doctor --json --copier libcudart\n  kvferry doctor --mooncake-library libtransfer_engine.so",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDoctor(cmd, o, asJSON)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.Copier, "copier", "", "`copier` to use: cuda, libcudart, libamdhip64 or portable (default the first that passes its self-test)")
	libraryFlags(f, &o.Libraries)
	f.StringSliceVar(&o.Mooncake, "mooncake-library", nil, "`files` of Mooncake's library, with commas, those that it needs first (default none: it is not looked at)")
	f.BoolVar(&asJSON, "json", false, "write the answer as JSON")
	return cmd
}

func runDoctor(cmd *cobra.Command, o doctor.Options, asJSON bool) error {
	report, err := doctor.Run(cmd.Context(), o)
	if err != nil {
		return err
	}
	report.Version = ownVersion()
	out := cmd.OutOrStdout()
	if asJSON {
		err = report.WriteJSON(out)
	} else {
		err = report.WriteText(out, colours(out, os.Getenv))
	}
	if err != nil {
		return errors.Join(report.Err(), fmt.Errorf("cannot write the answer: %w", err))
	}
	return report.Err()
}

// colours reports whether w shows colours, and its user wants them.
func colours(w io.Writer, getenv func(string) string) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && getenv("NO_COLOR") == "" && getenv("TERM") != "dumb"
}
