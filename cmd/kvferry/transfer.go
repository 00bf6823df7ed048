package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/transfer"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

// newTransfer returns the verb transfer and its own verbs.
func newTransfer() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "Move pages between two processes or hosts, every byte checked",
		Long: `Two commands in two terminals, or on two hosts, move pages of a KV cache: serve publishes a cache that is filled by
a seed, and read reads it and compares every byte. Without flags both are on one host and share memory.`,
		Example: `  kvferry transfer serve                                      in one terminal
  kvferry transfer read                                       in another one
  kvferry transfer serve --listen 10.0.0.1:7700 --key-file k  for another host, over TCP
  kvferry transfer key k                                      makes the key for it`,
		Args: cobra.ArbitraryArgs, // so that an unknown verb reaches RunE
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownVerb(cmd, args[0])
			}
			return cmd.Help()
		},
	}
	cmd.AddCommand(newTransferServe(), newTransferRead(), newTransferKey())
	return cmd
}

func newTransferServe() *cobra.Command {
	o := transfer.DefaultServe()
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Publish a cache that is filled by a seed, for kvferry transfer read",
		Long: `Makes a cache, fills it by --seed, and publishes its pages under a lease, again and again before it ends. The
descriptor, which is all that a reader needs, goes to --descriptor; it is not secret, but whoever can change it decides
what is read.

Readers on this host share its memory (hostipc). With --key-file and --listen readers anywhere reach it by TCP: both
sides prove that they have the key. With --tls what they read is encrypted, too. The pages of --device are shared with
processes on this host.

Mooncake, with --mooncake-library, asks nobody who they are: whoever reaches its ports can read what is served by it,
and write nothing, for it is mapped for reading only. Its library listens on all addresses of this host, and kvferry has
the kernel drop what comes by others than --mooncake-listen. Give it an address in a network that you trust.`,
		Example: `  kvferry transfer serve
  kvferry transfer serve --model llama-3-8b --pages 64 --once
  kvferry transfer serve --listen 10.0.0.1:7700 --key-file key --descriptor pages.kvfd
  kvferry transfer serve --descriptor -`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := &transfer.Log{W: cmd.OutOrStdout(), JSON: asJSON}
			if o.Descriptor == transfer.Stdio {
				log.W = cmd.ErrOrStderr()
			}
			// What reads our output may end before us: then writing fails, and all is taken
			// away, which the signal would not let us do.
			broken := make(chan os.Signal, 1)
			signal.Notify(broken, unix.SIGPIPE)
			defer signal.Stop(broken)
			err := transfer.Serve(cmd.Context(), o, cmd.OutOrStdout(), cmd.ErrOrStderr(), log)
			if werr := log.Err(); werr != nil {
				return errors.Join(err, fmt.Errorf("cannot write what happens: %w", werr))
			}
			return err
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.Var(&number{value: &o.Pages, least: 1}, "pages", "`pages` of the cache (default 256)")
	f.Var(&number{value: &o.Publish, least: 1}, "publish", "publish the first `n` pages (default all)")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`seed` of what the pages hold")
	f.StringVar(&o.Model, "model", "", "geometry of this `model`: llama-3-8b, qwen2.5-0.5b or deepseek-v3")
	f.Var(&number{value: &o.PageSize, least: 1}, "page-size", "`tokens` of a page (default 16)")
	f.Var(&number{value: &o.Layers, least: 1}, "layers", "`layers` of a page (default 16)")
	f.Var(&number{value: &o.KVHeads, least: 1}, "kv-heads", "KV `heads` of a layer (default 8)")
	f.Var(&number{value: &o.HeadDim, least: 1}, "head-dim", "`elements` of one head's K or V of a token (default 64)")
	f.Var(&number{value: &o.LatentDim, least: 1}, "latent-dim", "`elements` of a token's latent, for MLA instead of heads")
	f.StringVar(&o.DType, "dtype", "", "`type` of an element: fp8, int8, int4, fp4, bf16, fp16 or fp32 (default bf16)")
	f.StringVar(&o.Layout, "layout", "", "`order` of the axes in a page: NHD, HND or MLA (default NHD)")
	f.StringVar(&o.Arrangement, "arrangement", "", "`choice` of how the cache lies: layer-major, page-major or kv-first (default page-major)")
	f.DurationVar(&o.Lease, "lease", o.Lease, "`time` for which pages are promised, 1s to 24h")
	f.StringVar(&o.Descriptor, "descriptor", "", "write the descriptor to this `file`, or, with -, a line of it to standard output (default "+defaultDescriptor+")")
	f.BoolVar(&o.Once, "once", false, "end after the first acknowledgement")
	engineFlags(f, &o.Engines, "`engines` to offer, in this order, with commas: "+engineNames)
	f.StringVar(&o.Engines.Listen, "listen", "", "`address` that TCP listens on, like 10.0.0.1:7700 (default, with --key-file, any port of 127.0.0.1)")
	f.StringVar(&o.Engines.MooncakeListen, "mooncake-listen", "", "`address` of this host by which Mooncake is reached, at ports of its choice, open to all who reach them; what comes by others is dropped (default 127.0.0.1)")
	deviceFlags(f, &o.Device, &o.Copier, &o.Libraries)
	f.BoolVar(&asJSON, "json", false, "write what happens as JSON, one object a line")
	return cmd
}

const defaultDescriptor = "a file for both in the user's runtime directory"

func newTransferRead() *cobra.Command {
	o := transfer.DefaultRead()
	var asJSON bool
	seed := &optionalSeed{to: &o.Seed}
	cmd := &cobra.Command{
		Use:   "read",
		Short: "Read what kvferry transfer serve publishes, and check every byte",
		Long: `Reads the pages that a descriptor publishes into a cache of its own, and compares every byte with what the owner's
seed says, whatever checksums say. Then tells the owner that it can have its pages back, and says how fast it was.

Before each read the cache holds the complement of what it should hold afterwards, so that a byte that was not written
is as wrong as one from elsewhere. Tokens that were not asked for must be as they were before.`,
		Example: `  kvferry transfer read
  kvferry transfer read --repeat 10 --json
  kvferry transfer read --tokens 100:1000
  kvferry transfer read --descriptor pages.kvfd --key-file key`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runTransferRead(cmd, o, asJSON)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&o.Descriptor, "descriptor", "", "read the descriptor in this `file`, or, with -, a line of standard input (default "+defaultDescriptor+")")
	f.StringVar(&o.Tokens, "tokens", "", "read tokens `a:b`, from a to before b, of all pages in their order (default all)")
	f.Var(&number{value: &o.Repeat, least: 1}, "repeat", "read `n` times (default 1)")
	f.StringVar(&o.Verify, "verify", o.Verify, "`choice` of how much is compared with the seed's contents: full or off")
	f.Var(seed, "seed", "`seed` of what the pages should hold (default the one that the descriptor names)")
	f.StringVar(&o.Arrangement, "arrangement", "", "`choice` of how the cache lies that is read into: layer-major or page-major (default page-major)")
	f.DurationVar(&o.Deadline, "deadline", o.Deadline, "`time` that one read may take")
	engineFlags(f, &o.Engines, "`engines` to read by, with commas; which of them goes first is the owner's choice: "+engineNames)
	deviceFlags(f, &o.Device, &o.Copier, &o.Libraries)
	f.BoolVar(&asJSON, "json", false, "write the answer as JSON")
	return cmd
}

// runTransferRead reads, and writes the answer. With --json an error is part of the answer
// too; who interrupts it wants none.
func runTransferRead(cmd *cobra.Command, o transfer.ReadOptions, asJSON bool) error {
	result, err := transfer.Read(cmd.Context(), o, cmd.InOrStdin(), cmd.ErrOrStderr())
	if err != nil && (!asJSON || exitStatus(err) == exitInterrupt) {
		return err
	}
	result.Version = ownVersion()
	write := result.WriteText
	if asJSON {
		write = result.WriteJSON
	}
	if werr := write(cmd.OutOrStdout()); werr != nil {
		return errors.Join(err, fmt.Errorf("cannot write the answer: %w", werr))
	}
	return err
}

func newTransferKey() *cobra.Command {
	return &cobra.Command{
		Use:   "key file",
		Short: "Make a new key that the two sides of TCP share",
		Long: `Writes a new key to a file that only its owner can read, and never over one that is there. Copy it, by a way that
nobody else can read, to each host that is to read pages.`,
		Example: "  kvferry transfer key key",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				return nil
			}
			return fault.New(fault.Invalid, "", "%s takes the name of one file, and %d were given", cmd.CommandPath(), len(args)).
				Hint("for example: %s key", cmd.CommandPath())
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := engines.NewKeyFile(args[0]); err != nil {
				return err
			}
			if _, err := io.WriteString(cmd.OutOrStdout(), "a new key is in "+printable(args[0])+": give it to both sides with --key-file\n"); err != nil {
				return fmt.Errorf("cannot write the answer: %w", err)
			}
			return nil
		},
	}
}

// newMooncakeChild returns the hidden verb of the process that Mooncake's library runs in.
func newMooncakeChild() *cobra.Command {
	return &cobra.Command{
		Use:    mooncake.Verb,
		Hidden: true,
		Args:   noArgs,
		// Its parent says all that it needs: no environment, no file.
		PersistentPreRunE: func(*cobra.Command, []string) error { return nil },
		RunE:              func(*cobra.Command, []string) error { return mooncake.Serve() },
	}
}

const engineNames = "hostipc, tcp, mooncake, cudaipc, hipipc (default all that the other flags allow)"

// engineFlags adds the flags about transfer engines that both sides have.
func engineFlags(f *pflag.FlagSet, o *engines.Options, usage string) {
	f.StringSliceVar(&o.Names, "engine", nil, usage)
	f.StringVar(&o.KeyFile, "key-file", "", "`file` with the key that both sides of TCP have; kvferry transfer key makes one")
	f.BoolVar(&o.TLS, "tls", false, "encrypt what goes over TCP, by TLS 1.3; both sides or neither")
	mooncakeFlags(f, o)
}

// mooncakeFlags adds the flags about Mooncake.
func mooncakeFlags(f *pflag.FlagSet, o *engines.Options) {
	f.StringSliceVar(&o.Mooncake, "mooncake-library", nil, "`files` of Mooncake's library, with commas, those that it needs first (default none: without it there is no mooncake)")
}

// optionalSeed is a seed on the command line that may not be given.
type optionalSeed struct{ to **uint64 }

func (s *optionalSeed) Set(text string) error {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return errors.New("not a whole number of 0 or more")
	}
	*s.to = &n
	return nil
}

func (s *optionalSeed) String() string {
	if s.to == nil || *s.to == nil {
		return ""
	}
	return strconv.FormatUint(**s.to, 10)
}

func (*optionalSeed) Type() string { return "seed" }
