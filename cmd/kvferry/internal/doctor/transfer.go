package doctor

import (
	"context"
	"strings"
	"time"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/mooncake"
)

// What is tried may take so long; Mooncake's library has to start.
const (
	tryLimit      = 2 * time.Second
	mooncakeLimit = 10 * time.Second
)

// transfers says which engines of package transfer work here, and why not the others.
func (m *Machine) transfers(ctx context.Context, o Options) Section {
	return Section{Title: "transfer engines", Findings: []Finding{
		green("local", "always: two caches in one process"),
		m.hostIPC(ctx),
		m.tcp(ctx),
		mooncakeEngine(ctx, o.Mooncake),
	}}
}

// hostIPC says whether processes of this machine can read each other's host memory.
func (m *Machine) hostIPC(ctx context.Context) Finding {
	ctx, cancel := context.WithTimeout(ctx, tryLimit)
	defer cancel()
	r := m.HostIPC(ctx)
	if r.Sharing != nil {
		f := yellow(engines.HostIPC, limitRemedy(r.Sharing, "use tcp between processes, or let this one use memfds, Unix sockets and /proc"),
			"memory can't be handed to another process: %v", r.Sharing)
		if hint := fault.RemedyOf(r.Sharing); hint != "" {
			f.Remedy = hint
		}
		return f
	}
	text := "memory is handed to processes of this user by sockets in " + r.Dir
	if r.Process != nil {
		return green(engines.HostIPC, "%s; of memory that is no memfd nothing can be read: %v", text, r.Process)
	}
	return green(engines.HostIPC, "%s; memory that is no memfd is read by process_vm_readv", text)
}

// tcp says whether one process reaches another by TCP.
func (m *Machine) tcp(ctx context.Context) Finding {
	ctx, cancel := context.WithTimeout(ctx, tryLimit)
	defer cancel()
	r, err := m.TCP(ctx)
	if err != nil {
		return yellow(engines.TCP, limitRemedy(err, "bring the interface lo up, and look at the rules of the firewall for it"), "a read by 127.0.0.1 fails: %v", err)
	}
	return green(engines.TCP, "127.0.0.1 is reached in %d µs; both sides need one key (kvferry transfer key makes it), an owner an address (--listen)",
		max(1, r.RoundTrip.Microseconds()))
}

// mooncakeEngine says whether Mooncake's library works, if it was named.
func mooncakeEngine(ctx context.Context, libraries []string) Finding {
	if len(libraries) == 0 {
		return green(engines.Mooncake, "not looked at: --mooncake-library names its library, which kvferry doesn't come with")
	}
	ctx, cancel := context.WithTimeout(ctx, mooncakeLimit)
	defer cancel()
	r, err := mooncake.Check(ctx, mooncake.Options{Libraries: libraries, Listen: "127.0.0.1"})
	if err != nil {
		return wrong(engines.Mooncake, "name the files of its library that can be opened here, those that it needs first, or leave --mooncake-library out", err)
	}
	return green(engines.Mooncake, "%s, works in a child process; its ports ask nobody who they are: give it an address of a network that is yours", strings.TrimSpace(r.Release))
}

// deviceIPC tries whether an owner can share memory of a device.
func deviceIPC(a *device.Accelerator, vendor string) (Finding, error) {
	const remedy = "let the cache be copied through host memory, which hostipc and tcp read"
	name := deviceEngine(vendor)
	s, err := cudaipc.Probe(a)
	switch {
	case err != nil:
		return yellow(name, remedy, "%v", err), err
	case s.Handles != nil && s.Descriptors != nil:
		return yellow(name, remedy, "by handle: %v; by descriptors: %v", s.Handles, s.Descriptors), s.Handles
	case s.Handles != nil:
		return yellow(name, remedy, "memory that is allocated as usual is not shared: %v", s.Handles), s.Handles
	case s.Descriptors != nil:
		return green(name, "memory that is allocated as usual is shared; what is mapped piece by piece isn't: %v", s.Descriptors), s.Descriptors
	}
	return green(name, "memory is shared with processes on this device, by handle and by descriptors"), nil
}

// deviceEngine is the engine for memory of a vendor's devices.
func deviceEngine(vendor string) string {
	if vendor == accel.HIP {
		return engines.HIPIPC
	}
	return engines.CUDAIPC
}

// deviceEngines says, once the devices were looked at, which of them share their memory:
// as it was tried, or, where that wasn't reached, as the device says of itself.
func deviceEngines(sections []Section) (found []Finding) {
	for _, vendor := range []string{accel.CUDA, accel.HIP} {
		var yes, no []string
		name := deviceEngine(vendor)
		for _, s := range sections {
			if !strings.HasPrefix(s.Title, vendor+":") {
				continue
			}
			var last *Finding
			for i, f := range s.Findings {
				if f.Name == sharing || f.Name == name {
					last = &s.Findings[i]
				}
			}
			if last != nil && last.Level == Green {
				yes = append(yes, s.Title)
			} else {
				no = append(no, s.Title)
			}
		}
		switch {
		case len(yes)+len(no) == 0:
			found = append(found, green(name, "no device of %s was opened", vendor))
		case len(no) == 0:
			found = append(found, green(name, "%s: with processes on the same device", strings.Join(yes, ", ")))
		default:
			found = append(found, yellow(name, "see what is said of these devices; or let the cache be copied through host memory", "not %s; %s",
				strings.Join(no, ", "), orNobody(yes)))
		}
	}
	return found
}

func orNobody(names []string) string {
	if len(names) == 0 {
		return "and no other"
	}
	return "but " + strings.Join(names, ", ")
}
