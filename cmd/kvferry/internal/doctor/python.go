package doctor

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// distributions are the engines, and what goes with them, by the names that their
// packages have.
var distributions = []string{"vllm", "sglang", "mstar", "torch", "lmcache", "mooncake_transfer_engine", "nixl"}

// isEngine tells the engines among them.
func isEngine(name string) bool { return name == "vllm" || name == "sglang" || name == "mstar" }

// engines says which engines are installed. Nothing of theirs is run: what is installed
// stands in the names of folders.
func (m *Machine) engines() []Finding {
	folders := m.pythonFolders()
	var found []Finding
	for _, folder := range folders {
		var engines, others []string
		for _, name := range distributions {
			version := m.installed(folder, name)
			switch {
			case version == "":
			case isEngine(name):
				engines = append(engines, name+" "+version)
			default:
				others = append(others, name+" "+version)
			}
		}
		if len(engines) == 0 {
			continue
		}
		text := strings.Join(engines, ", ") + " in /" + folder
		if len(others) > 0 {
			text += " (with " + strings.Join(others, ", ") + ")"
		}
		found = append(found, green("Python", "%s", text))
	}
	if len(found) == 0 {
		found = append(found, green("Python", "no vllm, sglang or mstar in %s", count(len(folders), "folder of packages", "folders of packages")))
	}
	return found
}

// installed returns the version of a distribution in a folder of packages, "" when it is
// not there.
func (m *Machine) installed(folder, name string) string {
	for _, spelling := range slices.Compact([]string{name, strings.ReplaceAll(name, "_", "-")}) {
		// A name may be the beginning of another's; what follows must be a version.
		for _, kind := range []string{".dist-info", ".egg-info"} {
			all, err := fs.Glob(m.Root, path.Join(folder, spelling+"-[0-9]*"+kind))
			if err != nil || len(all) == 0 {
				continue
			}
			version := strings.TrimSuffix(strings.TrimPrefix(path.Base(all[0]), spelling+"-"), kind)
			version, _, _ = strings.Cut(version, "-py") // of an egg
			return version
		}
	}
	if m.exists(path.Join(folder, name, "__init__.py")) {
		return "(no version)"
	}
	return ""
}

// pythonFolders returns the folders of Python packages that there are: of the system, of
// every environment that can be guessed without running a Python.
func (m *Machine) pythonFolders() []string {
	var prefixes []string
	add := func(dir string) {
		if dir = strings.TrimPrefix(path.Clean("/"+dir), "/"); dir != "" {
			prefixes = append(prefixes, dir)
		}
	}
	for _, variable := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		add(m.Getenv(variable))
	}
	for bin := range strings.SplitSeq(m.Getenv("PATH"), ":") {
		if path.IsAbs(bin) && (m.exists(path.Join(bin, "python3")[1:]) || m.exists(path.Join(bin, "python")[1:])) {
			add(path.Dir(bin))
		}
	}
	for _, dir := range []string{"usr", "usr/local"} {
		add(dir)
	}
	home := m.Getenv("HOME")
	for _, pattern := range []string{
		"opt/*", "venv", "*/venv", "*/.venv", "workspace/*", // images of engines
		path.Join(home, ".local"), path.Join(home, "venv"), path.Join(home, ".venv"),
		path.Join(home, "*/venv"), path.Join(home, "*/.venv"), path.Join(home, ".pyenv/versions/*"),
		path.Join(home, "miniconda3"), path.Join(home, "miniconda3/envs/*"), "opt/*/envs/*",
	} {
		all, err := fs.Glob(m.Root, strings.TrimPrefix(pattern, "/"))
		if err == nil {
			for _, dir := range all {
				add(dir)
			}
		}
	}
	var folders []string
	for _, prefix := range prefixes {
		for _, pattern := range []string{"lib*/python3*/site-packages", "lib*/python3*/dist-packages"} {
			all, err := fs.Glob(m.Root, path.Join(prefix, pattern))
			if err == nil {
				folders = append(folders, all...)
			}
		}
	}
	for dir := range strings.SplitSeq(m.Getenv("PYTHONPATH"), ":") {
		if path.IsAbs(dir) && m.exists(dir[1:]) {
			folders = append(folders, path.Clean(dir)[1:])
		}
	}
	slices.Sort(folders)
	return slices.Compact(folders)
}

// count writes a number of things.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
