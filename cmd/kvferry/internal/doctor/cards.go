package doctor

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Vendors, as PCI numbers them.
const (
	nvidia = "0x10de"
	amd    = "0x1002"
)

// card is an accelerator on the PCI bus.
type card struct {
	address string // "0000:17:00.0"
	vendor  string
	node    int     // of NUMA; -1 when not known
	link    float64 // GB/s each way that the link to the host carries; 0 when not known
}

// pciCards returns the accelerators that the bus shows, whatever drives them.
func (m *Machine) pciCards() []card {
	const folder = "sys/bus/pci/devices"
	entries, err := fs.ReadDir(m.Root, folder)
	if err != nil {
		return nil
	}
	var cards []card
	for _, e := range entries {
		dir := path.Join(folder, e.Name())
		vendor, _ := m.text(path.Join(dir, "vendor"))
		class, _ := m.text(path.Join(dir, "class"))
		if !isAccelerator(vendor, class) {
			continue
		}
		c := card{address: e.Name(), vendor: vendor, node: -1, link: m.link(dir)}
		if s, ok := m.text(path.Join(dir, "numa_node")); ok {
			if n, err := strconv.Atoi(s); err == nil {
				c.node = n
			}
		}
		cards = append(cards, c)
	}
	return cards
}

// isAccelerator tells cards that compute. AMD's processors have graphics of their own,
// which is no card for that.
func isAccelerator(vendor, class string) bool {
	display, vga, accelerator := strings.HasPrefix(class, "0x03"), strings.HasPrefix(class, "0x0300"), strings.HasPrefix(class, "0x1200")
	switch vendor {
	case nvidia:
		return display
	case amd:
		return display && !vga || accelerator
	}
	return false
}

// link returns the bytes a nanosecond that the slot carries each way, at its best: cards
// slow their link down while they idle.
func (m *Machine) link(dir string) float64 {
	speed, _ := m.text(path.Join(dir, "max_link_speed")) // "32.0 GT/s PCIe"
	width, _ := m.text(path.Join(dir, "max_link_width"))
	rate, err1 := strconv.ParseFloat(strings.Fields(speed + " x")[0], 64)
	lanes, err2 := strconv.ParseFloat(width, 64)
	if err1 != nil || err2 != nil || lanes > 64 {
		return 0
	}
	code := 128.0 / 130 // of generation 3 and later
	if rate < 8 {
		code = 8.0 / 10
	}
	return rate * lanes * code / 8
}

// nvidiaDriver returns the version of the kernel's module, "" when there is none.
func (m *Machine) nvidiaDriver() string {
	// NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build …
	text, ok := m.field("proc/driver/nvidia/version", "NVRM version:")
	if !ok {
		return ""
	}
	for word := range strings.FieldsSeq(text) {
		if first, _, dotted := strings.Cut(word, "."); dotted {
			if _, err := strconv.Atoi(first); err == nil {
				return word
			}
		}
	}
	return "of unknown version"
}

// hasCUDA reports whether CUDA's library can be started and change nothing: where the
// driver's node is missing, the library makes it when it may.
func (m *Machine) hasCUDA() bool {
	return slices.ContainsFunc([]string{
		"dev/nvidiactl",
		"dev/dxg",   // of Windows
		"dev/nvmap", // of Tegra
	}, m.exists)
}

// hasHIP is hasCUDA for AMD.
func (m *Machine) hasHIP() bool { return m.exists("dev/kfd") }

// cards says which cards there are, and whether the kernel drives them.
func (m *Machine) cards() []Finding {
	by := map[string][]string{}
	for _, c := range m.pciCards() {
		by[c.vendor] = append(by[c.vendor], c.address)
	}
	return []Finding{m.nvidiaCards(by[nvidia]), m.amdCards(by[amd]), m.libraries()}
}

// libraries says which of the vendors' libraries lie where they usually do. The loader may
// know of more; the section of a device says which it found.
func (m *Machine) libraries() Finding {
	const name = "libraries"
	var found []string
	for _, folder := range []string{
		"usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib",
		"usr/local/cuda*/lib64", "usr/local/cuda*/compat", "usr/lib/wsl/lib", "usr/local/nvidia/lib64", "opt/rocm*/lib",
	} {
		for _, library := range []string{"libcuda.so.1", "libcudart.so.1[23]", "libamdhip64.so.[567]"} {
			all, err := fs.Glob(m.Root, path.Join(folder, library))
			if err != nil {
				continue
			}
			for _, file := range all {
				found = append(found, "/"+file)
			}
		}
	}
	if len(found) == 0 {
		return green(name, "no libcuda, libcudart or libamdhip64 in the usual folders")
	}
	return green(name, "%s", strings.Join(found, " "))
}

func (m *Machine) nvidiaCards(cards []string) Finding {
	const name = "NVIDIA"
	driver, what := m.nvidiaDriver(), ""
	if len(cards) > 0 {
		what = ": " + strings.Join(cards, " ")
	}
	switch {
	case m.hasCUDA() && driver != "":
		return green(name, "%s, driver %s%s", onBus(cards), driver, what)
	case m.hasCUDA():
		return green(name, "%s, and a driver%s", onBus(cards), what)
	case driver != "":
		return red(name, "docker run --gpus all; on the machine itself, nvidia-smi as root makes the node",
			"%s and driver %s, but no /dev/nvidiactl%s", onBus(cards), driver, what)
	case len(cards) > 0:
		return red(name, "install NVIDIA's driver on the machine; nvidia-smi tells whether it works", "%s and no driver%s", onBus(cards), what)
	}
	return green(name, "no card, no driver")
}

// onBus counts cards.
func onBus(cards []string) string {
	if len(cards) == 0 {
		return "no card shown by the bus"
	}
	return count(len(cards), "card", "cards")
}

func (m *Machine) amdCards(cards []string) Finding {
	const name = "AMD"
	what := ""
	if len(cards) > 0 {
		what = ": " + strings.Join(cards, " ")
	}
	switch {
	case m.hasHIP():
		return green(name, "%s, driver (/dev/kfd)%s", onBus(cards), what)
	case len(cards) > 0:
		return red(name, "load amdgpu on the machine; docker run --device=/dev/kfd --device=/dev/dri", "%s and no /dev/kfd%s", onBus(cards), what)
	}
	return green(name, "no card, no driver")
}
