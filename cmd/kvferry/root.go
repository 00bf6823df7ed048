package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

// run executes one command line and returns its exit status.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)

	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	report(stderr, err)
	return exitStatus(err)
}

// report says what went wrong and what can be done about it.
func report(stderr io.Writer, err error) {
	if err == nil {
		return
	}
	if exitStatus(err) == exitInterrupt { // where it was is of no use to who ended it
		_, _ = fmt.Fprintln(stderr, "kvferry: error: interrupted")
		return
	}
	_, _ = fmt.Fprintf(stderr, "kvferry: error: %s\n", printable(err.Error()))
	if hint := fault.RemedyOf(err); hint != "" {
		_, _ = fmt.Fprintf(stderr, "kvferry: hint: %s\n", printable(hint))
	}
}

// printable writes the control characters of s out, which may hold the name of a file,
// so that no terminal obeys them. Errors that were joined have a line each.
func printable(s string) string {
	control := func(r rune) bool { return unicode.IsControl(r) && r != '\n' }
	if !strings.ContainsFunc(s, control) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if control(r) {
			fmt.Fprintf(&b, "\\x%02x", r)
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvferry",
		Short: "Moves the pages of an LLM's KV cache between memories, and shows how",
		Long: `kvferry moves the pages of an LLM's KV cache between the memories that can hold them.

Every option has one name: the flag --host-pages, the environment variable KVFERRY_HOST_PAGES and the
key host-pages of the TOML file that --config names are the same. A flag goes before the environment,
the environment before the file, the file before the default. An empty variable counts as not set.`,
		Example: `  kvferry replay                            replay a built-in chat load, every byte checked
  kvferry replay --trace chat.jsonl --json  replay a trace, answer for machines
  kvferry transfer serve                    publish pages, for kvferry transfer read elsewhere
  kvferry bench copy                        measure copies beside what memory allows
  kvferry doctor                            say what of this machine works
  kvferry help exit                         what the exit status says`,
		Args: cobra.ArbitraryArgs, // so that an unknown verb reaches RunE
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownVerb(cmd, args[0])
			}
			return cmd.Help()
		},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return bind(cmd, os.Environ())
		},
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
	}
	root.PersistentFlags().String("config", "", "read options from this TOML `file`")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fault.Wrap(fault.Invalid, "", err).Hint("%s --help lists the flags", cmd.CommandPath())
	})
	root.SetHelpCommand(newHelp())
	root.AddCommand(newReplay(), newTransfer(), newBench(), newDoctor(), newVersion(), newExitTopic(), newMooncakeChild())
	return root
}

func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [verb]",
		Short:   "Explain a verb, or one of the topics below",
		Example: "  kvferry help replay\n  kvferry help exit",
		// Help must not depend on the environment or on a file.
		PersistentPreRunE: func(*cobra.Command, []string) error { return nil },
		RunE: func(help *cobra.Command, args []string) error {
			verb, rest, err := help.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return unknownVerb(help.Root(), strings.Join(args, " "))
			}
			return verb.Help()
		},
	}
}

func unknownVerb(root *cobra.Command, name string) error {
	root.SuggestionsMinimumDistance = 2
	err := fault.New(fault.Invalid, "", "unknown verb %q", name)
	if near := root.SuggestionsFor(name); len(near) > 0 {
		return err.Hint("did you mean %s?", strings.Join(near, " or "))
	}
	return err.Hint("kvferry --help lists the verbs")
}

// noArgs refuses arguments that are not flags.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fault.New(fault.Invalid, "", "%s takes no arguments, yet %q was given", cmd.CommandPath(), args[0]).
		Hint("%s --help lists the flags", cmd.CommandPath())
}
