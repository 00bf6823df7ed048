package gpu

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/abi"
)

// Count returns how many devices this process may use.
func (l *Library) Count() (int, error) {
	n, err := l.Out(abi.DeviceCount)
	return max(0, int(int32(n))), err
}

// List describes all devices of a library, in the order of their ordinals.
func List[A any](l *Library, describe func(ordinal int) (A, error)) ([]A, error) {
	n, err := l.Count()
	if err != nil {
		return nil, l.NoDevice("", err)
	}
	all := make([]A, n)
	for i := range all {
		if all[i], err = describe(i); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Handle returns the library's word for a device.
func (l *Library) Handle(ordinal int) (uintptr, error) {
	h, err := l.Out(abi.DeviceGet, uintptr(ordinal))
	return uintptr(h), err
}

// Attribute returns an attribute of a device, 0 when the library does not know it.
func (l *Library) Attribute(dev uintptr, attribute int) int {
	v, err := l.Out(abi.DeviceAttribute, uintptr(attribute), dev)
	if err != nil {
		return 0
	}
	return int(int32(v))
}

// Bytes returns the size of a device's memory.
func (l *Library) Bytes(dev uintptr) (int64, error) {
	n, err := l.Out(abi.DeviceBytes, dev)
	return int64(n), err
}

// Text returns what a call about a device writes as a C string: its name, its PCI
// address.
func (l *Library) Text(c int, dev uintptr) (string, error) {
	b, err := l.Blocks.Get()
	if err != nil {
		return "", err
	}
	defer l.Blocks.Put(b)
	const room = 256
	b.Words[0] = 0
	if err := l.Call(c, b.Addr, room, dev); err != nil {
		return "", err
	}
	return b.String(0), nil
}

// UUID returns the id of a device that is the same in all processes, "" when there is
// none.
func (l *Library) UUID(dev uintptr) (string, error) {
	b, err := l.Blocks.Get()
	if err != nil {
		return "", err
	}
	defer l.Blocks.Put(b)
	clear(b.Bytes[:abi.UUIDBytes])
	if err := l.Call(abi.DeviceUUID, b.Addr, dev); err != nil {
		return "", err
	}
	return formatUUID([abi.UUIDBytes]byte(b.Bytes)), nil
}

// formatUUID writes an id as the vendor's tools do: NVIDIA's are bytes, AMD's the digits
// of 8 bytes.
func formatUUID(id [abi.UUIDBytes]byte) string {
	if id == [abi.UUIDBytes]byte{} {
		return ""
	}
	if _, err := hex.DecodeString(string(id[:])); err == nil {
		return "GPU-" + string(id[:])
	}
	x := hex.EncodeToString(id[:])
	return "GPU-" + strings.Join([]string{x[:8], x[8:12], x[12:16], x[16:20], x[20:]}, "-")
}

// CheckName refuses what names no device of any machine: it must be a number from 0, or
// a UUID or the beginning of one, with GPU- or MIG- before it or without. Kind:
// fault.Invalid.
func CheckName(vendor, which string) error {
	if id := bare(which); which != "" && strings.Trim(id, "0123456789abcdef-") == "" && !strings.HasPrefix(id, "-") {
		return nil
	}
	return fault.New(fault.Invalid, deviceName(vendor, which), "which of the devices? Want a number from 0, or a UUID").
		Hint("write %s:0, or %s:GPU- and the digits of its UUID; kvferry doctor lists the devices", vendor, vendor)
}

// deviceName is the name of a device for people, who may have written anything.
func deviceName(vendor, which string) string {
	if which == "" || strings.ContainsFunc(which, func(r rune) bool { return r <= ' ' || r > '~' }) {
		which = strconv.Quote(which)
	}
	if len(which) > 64 {
		which = which[:60] + " ..."
	}
	return vendor + ":" + which
}

// Pick returns the ordinal of the device that which names, as CheckName has it. Kinds:
// fault.NotFound, fault.Invalid (the beginning of more than one UUID).
func (l *Library) Pick(vendor, which string) (int, error) {
	if err := CheckName(vendor, which); err != nil {
		return 0, err
	}
	object := deviceName(vendor, which)
	n, err := l.Count()
	if err == nil && n == 0 {
		err = fault.New(fault.NotFound, "", "this process sees no device")
	}
	if err != nil {
		return 0, l.NoDevice(object, err)
	}
	if i, err := strconv.ParseUint(which, 10, 31); err == nil {
		if int(i) >= n {
			return 0, fault.New(fault.NotFound, object, "this process sees %d devices", n).
				Hint("ordinals count from 0; kvferry doctor lists the devices")
		}
		return int(i), nil
	}
	var found []int
	var named []string
	var errs []error
	for i := range n {
		dev, err := l.Handle(i)
		if err == nil {
			var id string
			id, err = l.UUID(dev)
			if id != "" && strings.HasPrefix(bare(id), bare(which)) {
				found, named = append(found, i), append(named, fmt.Sprintf("%s:%d is %s", vendor, i, id))
			}
		}
		errs = append(errs, err)
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return 0, fault.New(fault.Invalid, object, "ambiguous: %s", strings.Join(named, ", ")).
			Hint("write more of the UUID, or the number")
	}
	return 0, (&fault.Error{Kind: fault.NotFound, Object: object, Detail: "no device has that UUID", Err: errors.Join(errs...)}).
		Hint("kvferry doctor lists the devices")
}

// NoDevice is err about object, which says with kind fault.NotFound that there is no
// device, with what can be done about that.
func (l *Library) NoDevice(object string, err error) error {
	wrapped := fault.Wrap(fault.KindOf(err), object, err)
	if errors.Is(err, fault.NotFound) {
		return wrapped.Hint("no device is visible: check %s", l.Visible)
	}
	return wrapped
}

// NotOpened is the error of a library that could not be opened, with a remedy.
func NotOpened(name string, err error) error {
	wrapped := fault.Wrap(fault.KindOf(err), name, err)
	if fault.RemedyOf(err) == "" {
		return wrapped.Hint("install what has %s, or give its path", name)
	}
	return wrapped
}

// NotOne is the error of a file that was opened as a library of a vendor, and lacks a
// function.
func NotOne(name, file, function, what string) error {
	return fault.New(fault.Unsupported, name, "%s has no function %s: it is no %s", file, function, what).
		Hint("name the file of %s, or none: then it is looked for", name)
}

// bare is a UUID as it is compared.
func bare(id string) string {
	id = strings.ToLower(id)
	return strings.TrimPrefix(strings.TrimPrefix(id, "gpu-"), "mig-")
}

// Root returns root, or this machine's root of its file system when that is nil.
func Root(root fs.FS) fs.FS {
	if root != nil {
		return root
	}
	return os.DirFS("/")
}

// NUMANode returns the NUMA node of the card at a PCI address, as root says; -1 when it
// does not.
func NUMANode(root fs.FS, pci string) int {
	text, err := fs.ReadFile(Root(root), path.Join("sys/bus/pci/devices", strings.ToLower(pci), "numa_node"))
	if err != nil {
		return -1
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return node
}
