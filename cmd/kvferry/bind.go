package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/fault"
)

const envPrefix = "KVFERRY_"

// envName returns the environment variable of a flag.
func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// bind gives every flag of cmd that was not on the command line its value from
// the environment or, failing that, from the file that --config names. A flag
// set here counts as given, like one on the command line.
//
// A key that no verb has is refused. A variable that no verb has is only warned
// of: the environment is shared, and it may be meant for another version.
func bind(cmd *cobra.Command, environ []string) error {
	known := optionsOf(cmd.Root())
	env := map[string]string{}
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, envPrefix) || value == "" {
			continue
		}
		env[name] = value
		if !slices.ContainsFunc(known, func(f string) bool { return envName(f) == name }) {
			_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "kvferry: warning: %s is not an option and has no effect\n", name)
		}
	}
	if config := cmd.Flags().Lookup("config"); config != nil {
		if err := setFrom(config, env); err != nil {
			return err
		}
	}
	path, _ := cmd.Flags().GetString("config")
	file, err := readConfig(path, known)
	if err != nil {
		return err
	}
	var first error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if first != nil || f.Changed || f.Name == "help" || f.Name == "config" {
			return
		}
		if first = setFrom(f, env); first != nil || f.Changed {
			return
		}
		if value, ok := file[f.Name]; ok {
			first = setFlag(f, path+": "+f.Name, value)
		}
	})
	return first
}

// optionsOf returns the names of the flags of all verbs.
func optionsOf(root *cobra.Command) []string {
	var names []string
	for _, cmd := range commandsOf(root) {
		for _, flags := range []*pflag.FlagSet{cmd.LocalFlags(), cmd.PersistentFlags()} {
			flags.VisitAll(func(f *pflag.Flag) {
				if f.Name != "help" {
					names = append(names, f.Name)
				}
			})
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// commandsOf returns cmd and everything below it that is not hidden, as what cobra
// adds for shells is.
func commandsOf(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			all = append(all, commandsOf(c)...)
		}
	}
	return all
}

// setFrom sets a flag from the environment, unless it was given before.
func setFrom(f *pflag.Flag, env map[string]string) error {
	name := envName(f.Name)
	value, ok := env[name]
	if !ok || f.Changed {
		return nil
	}
	return setFlag(f, name, value)
}

func setFlag(f *pflag.Flag, where, value string) error {
	if err := f.Value.Set(value); err != nil {
		return fault.New(fault.Invalid, where, "bad value %q: %v", value, err).
			Hint("it takes what --%s takes", f.Name)
	}
	f.Changed = true
	return nil
}

// readConfig reads a flat TOML file of options, as text by name.
func readConfig(path string, known []string) (map[string]string, error) {
	if path == "" {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fault.Wrap(fault.NotFound, "--config", err).Hint("leave --config out to use the defaults")
	}
	var doc map[string]any
	if err := toml.Unmarshal(b, &doc); err != nil {
		where := path
		if at, ok := errors.AsType[*toml.DecodeError](err); ok {
			line, _ := at.Position()
			where = fmt.Sprintf("%s:%d", path, line)
		}
		return nil, fault.Wrap(fault.Invalid, where, err).Hint("a line is an option, like host-pages = 8192")
	}
	values := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(doc)) {
		if name == "config" || !slices.Contains(known, name) {
			keys := slices.DeleteFunc(slices.Clone(known), func(f string) bool { return f == "config" })
			return nil, fault.New(fault.Invalid, path, "unknown key %q", name).
				Hint("the keys are the names of the flags: %s", strings.Join(keys, ", "))
		}
		switch v := doc[name].(type) {
		case string:
			values[name] = v
		case bool:
			values[name] = strconv.FormatBool(v)
		case int64:
			values[name] = strconv.FormatInt(v, 10)
		case float64:
			values[name] = strconv.FormatFloat(v, 'g', -1, 64)
		default:
			return nil, fault.New(fault.Invalid, path+": "+name, "not a single value").
				Hint("a line is an option, like host-pages = 8192; what takes a list, takes engine = \"hostipc,tcp\"")
		}
	}
	return values, nil
}
