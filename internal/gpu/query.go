package gpu

import (
	"encoding/hex"
	"errors"
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
		return nil, err
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

// Pick returns the ordinal of the device that which names: an ordinal, or a UUID or the
// beginning of one, with GPU- or MIG- before it or without. Kinds: fault.NotFound,
// fault.Invalid (more than one).
func (l *Library) Pick(vendor, which string) (int, error) {
	n, err := l.Count()
	if err != nil {
		return 0, err
	}
	object := vendor + ":" + which
	if i, err := strconv.ParseUint(which, 10, 31); err == nil {
		if int(i) >= n {
			return 0, fault.New(fault.NotFound, object, "this process sees %d devices", n).
				Hint("ordinals count from 0; kvferry doctor lists the devices")
		}
		return int(i), nil
	}
	var found []int
	var errs []error
	for i := range n {
		dev, err := l.Handle(i)
		if err == nil {
			var id string
			id, err = l.UUID(dev)
			if want := bare(which); want != "" && strings.HasPrefix(bare(id), want) {
				found = append(found, i)
			}
		}
		errs = append(errs, err)
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return 0, fault.New(fault.Invalid, object, "devices %v have a UUID that begins so", found)
	}
	return 0, (&fault.Error{Kind: fault.NotFound, Object: object, Detail: "no device has that UUID", Err: errors.Join(errs...)}).
		Hint("kvferry doctor lists the devices")
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
