package cudaipc

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
)

// MaxTensorBytes is the most that [ParseTensor] takes.
const MaxTensorBytes = 1 << 20

// Tensor is a tensor on a device, as its process, which runs torch, shares it with others.
// A Python engine writes it as JSON, its bytes in base64:
//
//	share = t.untyped_storage()._share_cuda_()
//	text = json.dumps(dict(
//	    device=share[0], handle=b64(share[1]), storage_bytes=share[2], storage_offset=share[3],
//	    ref_counter=b64(share[4]), ref_counter_slot=share[5], event=b64(share[6]), event_sync=share[7],
//	    size=t.shape, stride=t.stride(), offset=t.storage_offset(), dtype=str(t.dtype), requires_grad=t.requires_grad,
//	    uuid=str(torch.cuda.get_device_properties(t.device).uuid)))
//
// The tensor must live as long as it is open anywhere. Each call of _share_cuda_ takes a
// place in torch's counter of references, which nobody here gives back: torch then keeps
// the memory until its process ends, and says so.
type Tensor struct {
	// What torch's own tuple of 8 has, in its order.
	Device         int    `json:"device"` // in the numbering of its process, which means nothing here
	Handle         []byte `json:"handle"`
	StorageBytes   int64  `json:"storage_bytes"`
	StorageOffset  int64  `json:"storage_offset"` // of the storage in what the handle opens, in bytes
	RefCounter     []byte `json:"ref_counter"`    // not looked at, as the next
	RefCounterSlot int64  `json:"ref_counter_slot"`
	Event          []byte `json:"event"`
	EventSync      bool   `json:"event_sync"` // Event is to be waited for

	// What the tensor is in its storage, in elements.
	Size         []int64 `json:"size"`
	Stride       []int64 `json:"stride"`
	Offset       int64   `json:"offset"`
	DType        string  `json:"dtype"`         // "torch.bfloat16"
	RequiresGrad bool    `json:"requires_grad"` // not looked at

	// Which device it is on: either is enough.
	UUID string `json:"uuid"`
	PCI  string `json:"pci"` // "0000:17:00.0"
}

// ParseTensor reads the JSON of a tensor, for bytes from anybody. What the fields say is
// looked at by OpenTensors. Kind: fault.Invalid.
func ParseTensor(b []byte) (*Tensor, error) {
	if len(b) > MaxTensorBytes {
		return nil, fault.New(fault.Invalid, "tensor", "%d bytes are more than %d", len(b), MaxTensorBytes)
	}
	t, in := &Tensor{}, json.NewDecoder(bytes.NewReader(b))
	in.DisallowUnknownFields()
	if err := in.Decode(t); err != nil {
		return nil, fault.Wrap(fault.Invalid, "tensor", err)
	}
	if _, err := in.Token(); !errors.Is(err, io.EOF) {
		return nil, fault.New(fault.Invalid, "tensor", "something follows it")
	}
	return t, nil
}

// Tensors is a cache in the memory of tensors of another process.
type Tensors struct {
	// Cache is their memory. Its pages are the other process's: package transfer says what
	// it takes to read them.
	Cache *kv.Cache

	regions []*device.Memory
	opened  map[string]opened
}

// OpenTensors opens a cache that another process keeps in tensors on device a: one for
// each region of the geometry, in that order. process is a pidfd of that process, by
// which memory of several pieces (torch's expandable segments) is fetched; -1 where there
// is none, which is enough for all other memory. It returns when ctx ends at the latest.
//
// A tensor must have the axes that the geometry says: pages, tokens, heads and K and V of
// these numbers, at these distances, and elements of its type. Only of a tensor of one
// dimension nothing is known but its size.
//
// Kinds: fault.Invalid (a tensor that is none, or isn't as the geometry says),
// fault.Unsupported (another device; a form of handle, or of memory, that is not known),
// fault.NotFound (process has ended), fault.Device (the library does not open it),
// fault.Busy (ctx has ended).
func OpenTensors(ctx context.Context, a *device.Accelerator, g *kv.Geometry, tensors []Tensor, process int) (_ *Tensors, err error) {
	_, driver, err := sharingOf(a)
	if err != nil {
		return nil, err
	}
	sizes := g.Spec().RegionBytes
	if len(tensors) != len(sizes) {
		return nil, fault.New(fault.Invalid, "tensors", "%d for %d regions", len(tensors), len(sizes))
	}
	o := &Tensors{opened: map[string]opened{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, o.Close())
		}
	}()
	for i := range tensors {
		t, at := &tensors[i], fmt.Sprintf("tensor %d", i)
		var base uintptr
		if sizes[i] > 0 {
			data, err := t.check(g, i)
			if err == nil {
				err = deviceID{t.UUID, t.PCI}.check(idOf(a), a.Name())
			}
			if err == nil {
				base, err = o.open(ctx, driver, t, process)
			}
			if err != nil {
				return nil, wrap(fault.Device, at, err)
			}
			base += uintptr(data)
		}
		m, err := a.Wrap(base, sizes[i])
		if err != nil {
			return nil, wrap(fault.Device, at, err)
		}
		o.regions = append(o.regions, m)
	}
	o.Cache, err = kv.WrapOn(g, o.regions, a)
	return o, err
}

// wrap says what err is about, and of which kind it is where it has none.
func wrap(kind fault.Kind, object string, err error) error {
	if k := fault.KindOf(err); k != 0 {
		kind = k
	}
	return fault.Wrap(kind, object, err)
}

// open opens what the handle of t names, and returns where its storage begins.
func (o *Tensors) open(ctx context.Context, driver sharing, t *Tensor, process int) (uintptr, error) {
	h, err := parseTorchHandle(t.Handle)
	if err != nil {
		return 0, err
	}
	if err := t.wait(ctx, driver); err != nil {
		return 0, err
	}
	m, ok := o.opened[string(t.Handle)]
	if !ok {
		if h.fds == nil {
			m, err = driver.openMemory(h.handle)
		} else {
			m, err = h.openPieces(driver, process)
		}
		if err != nil {
			return 0, wrap(fault.Device, "handle", err)
		}
		o.opened[string(t.Handle)] = m
	}
	if t.StorageOffset > m.bytes-t.StorageBytes {
		return 0, fault.New(fault.Invalid, "storage", "of %d bytes from byte %d on, and the handle opens %d", t.StorageBytes, t.StorageOffset, m.bytes)
	}
	return m.addr + uintptr(t.StorageOffset), nil
}

// wait waits for the event of t: for what its process had enqueued when it shared it.
func (t *Tensor) wait(ctx context.Context, driver sharing) error {
	if !t.EventSync {
		return nil
	}
	if len(t.Event) != handleBytes {
		return fault.New(fault.Invalid, "event", "%d bytes, and a handle has %d", len(t.Event), handleBytes)
	}
	ev, err := driver.openEvent(handle(t.Event))
	if err != nil {
		return wrap(fault.Device, "event", err)
	}
	err = ev.wait(ctx)
	if err != nil {
		err = wrap(fault.Busy, "event", err)
	}
	return errors.Join(err, ev.close())
}

// Close ends the use of the tensors. Nothing uses the cache any more: fault.Busy while
// something does, and then it can be tried again.
func (o *Tensors) Close() error {
	if o.Cache != nil {
		if err := o.Cache.Close(); err != nil && !errors.Is(err, fault.Closed) {
			return err
		}
		o.Cache = nil
	}
	var errs []error
	o.regions = slices.DeleteFunc(o.regions, func(m *device.Memory) bool {
		err := m.Free()
		errs = append(errs, err)
		return err == nil
	})
	if len(o.regions) > 0 {
		return errors.Join(errs...)
	}
	for name, m := range o.opened {
		errs = append(errs, m.close())
		delete(o.opened, name)
	}
	return errors.Join(errs...)
}

// torchHandle is what the bytes of a handle of torch's say.
type torchHandle struct {
	handle handle
	pid    int32 // of its process, in its own numbering; with fds
	each   int64 // bytes of a piece
	fds    []int32
}

// Handles of torch's, and which forms of them are known.
const (
	torchPlain      = 'c'
	torchExpandable = 'e'
	torchNewest     = 2  // version of the header of expandable segments
	torchHeader     = 24 // bytes of it
)

// parseTorchHandle reads the bytes of a handle, in the forms of torch to 2.12, and of
// those since whose form is the same: 64 bytes as the library made them; or a version, a
// type and what follows. Kinds: fault.Invalid, fault.Unsupported.
func parseTorchHandle(b []byte) (h torchHandle, err error) {
	if len(b) == handleBytes {
		return torchHandle{handle: handle(b)}, nil
	}
	if len(b) < 2 {
		return h, fault.New(fault.Invalid, "handle", "of %d bytes", len(b)).Hint("share a storage that is not empty")
	}
	version, kind, rest := b[0], b[1], b[2:]
	switch {
	case kind == torchPlain && len(rest) == handleBytes:
		return torchHandle{handle: handle(rest)}, nil
	case kind == torchPlain:
		return h, fault.New(fault.Invalid, "handle", "of %d bytes behind its type, and not %d", len(rest), handleBytes)
	case kind != torchExpandable:
		return h, fault.New(fault.Unsupported, "handle", "of the type %q, version %d, which is not known", kind, version)
	case version < 1 || version > torchNewest:
		return h, fault.New(fault.Unsupported, "handle", "of an expandable segment in version %d, and versions 1 to %d are known", version, torchNewest).
			Hint("start the engine with expandable_segments:False")
	case len(rest) < torchHeader:
		return h, fault.New(fault.Invalid, "handle", "truncated: %d bytes of a header of %d", len(rest), torchHeader)
	}
	le := binary.LittleEndian
	h.pid = int32(le.Uint32(rest))
	each, n := le.Uint64(rest[8:]), le.Uint64(rest[16:])
	rest = rest[torchHeader:]
	switch {
	case each < 1 || each > maxBytes || n < 1 || n > maxPieces:
		return h, fault.New(fault.Invalid, "handle", "%d segments of %d bytes", n, each)
	case uint64(len(rest)) == n*handleBytes:
		return h, fault.New(fault.Unsupported, "handle", "of fabric memory").Hint("start the engine with expandable_segments:False")
	case uint64(len(rest)) != 4*n:
		return h, fault.New(fault.Invalid, "handle", "%d bytes of %d segments", len(rest), n)
	}
	h.each, h.fds = int64(each), make([]int32, n)
	for i := range h.fds {
		h.fds[i] = int32(le.Uint32(rest[4*i:]))
	}
	return h, nil
}

// openPieces fetches the descriptors from the process that has them, and maps them. Which
// process that is, the handle only claims: it must be the one that the caller knows.
func (h *torchHandle) openPieces(driver sharing, process int) (opened, error) {
	if process < 0 {
		return opened{}, fault.New(fault.Unsupported, "segments", "of process %d, and this process has no pidfd of it", h.pid).
			Hint("start the engine with expandable_segments:False, or give its pidfd")
	}
	if err := checkPID(process, h.pid); err != nil {
		return opened{}, err
	}
	var files []int
	defer func() { closeAll(files) }()
	pieces := make([]piece, 0, len(h.fds))
	for _, theirs := range h.fds {
		fd, err := unix.PidfdGetfd(process, int(theirs), 0)
		switch {
		case err == unix.ESRCH:
			return opened{}, errEnded(h.pid)
		case err == unix.EBADF:
			return opened{}, fault.New(fault.Invalid, "segments", "process %d has no descriptor %d", h.pid, theirs)
		case err != nil:
			return opened{}, fault.Wrap(fault.Unsupported, fmt.Sprintf("descriptor %d of process %d", theirs, h.pid), err).
				Hint("let this process trace it (as one user, with kernel.yama.ptrace_scope 0), or start the engine with expandable_segments:False")
		}
		files, pieces = append(files, fd), append(pieces, piece{fd, h.each})
	}
	return driver.openPieces(pieces)
}

func errEnded(pid int32) error {
	return fault.New(fault.NotFound, "segments", "their process %d has ended", pid)
}

// checkPID refuses a pidfd of another process than pid, by its number in any of the
// namespaces that it is in, or of one that has ended.
func checkPID(pidfd int, pid int32) error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", pidfd))
	if err != nil {
		return fault.Wrap(fault.Invalid, "pidfd", err)
	}
	known := false
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "Pid" && name != "NSpid" {
			continue
		}
		for number := range strings.FieldsSeq(value) {
			n, err := strconv.ParseInt(number, 10, 32)
			if err == nil && n == -1 {
				return errEnded(pid)
			}
			known = true
			if err == nil && n == int64(pid) {
				return nil
			}
		}
	}
	if !known {
		return fault.New(fault.Invalid, "pidfd", "descriptor %d is none", pidfd)
	}
	return fault.New(fault.Invalid, "segments", "are of process %d, and the pidfd is of another one", pid)
}
