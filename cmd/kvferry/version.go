package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// buildVersion says which kvferry this is, as far as the build knows.
type buildVersion struct {
	Version  string `json:"version"`  // "devel" for a build from a working tree
	Revision string `json:"revision"` // of the source, "" if unknown
	Time     string `json:"time"`     // of the revision, "" if unknown
	Modified bool   `json:"modified"` // the working tree differed from the revision
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
}

func newVersion() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Say which kvferry this is",
		Example: "  kvferry version --json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info, _ := debug.ReadBuildInfo()
			return versionOf(info).write(cmd.OutOrStdout(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "write the answer as JSON")
	return cmd
}

// versionOf reads what the linker left; info may be nil.
func versionOf(info *debug.BuildInfo) buildVersion {
	v := buildVersion{Version: "devel", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	if info == nil {
		return v
	}
	if info.Main.Version != "" && info.Main.Version != "(devel)" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.time":
			v.Time = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

func (v buildVersion) write(w io.Writer, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	_, err := fmt.Fprintln(w, v)
	return err
}

func (v buildVersion) String() string {
	s := "kvferry " + v.Version
	if v.Revision != "" {
		s += ", revision " + v.Revision[:min(12, len(v.Revision))]
		if v.Modified {
			s += " and changes"
		}
	}
	if v.Time != "" {
		s += ", " + v.Time
	}
	return s + fmt.Sprintf(", %s %s/%s", v.Go, v.OS, v.Arch)
}
