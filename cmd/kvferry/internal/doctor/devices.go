package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/ceiling"
	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
)

// A vendor's library can hang for ever in a driver. It is left alone after answerLimit,
// which is for the devices of all vendors, or leastAnswer where another has used that up.
const (
	answerLimit = 20 * time.Second
	leastAnswer = 4 * time.Second
)

// Remedies of more than one finding.
const (
	sendReport  = "send this report with a bug report to kvferry"
	readLog     = "look for errors of the driver in the kernel's log (dmesg), and restart the machine"
	freeDevice  = "leave some of the device's memory free for this test: end an engine, or lower its share"
	freeMemory  = "end what needs memory, or raise the container's limit"
	measureLong = "see that nothing else uses the device; kvferry bench copy --device measures for as long as it takes"
)

// maker opens the devices of one vendor.
type maker struct {
	name    string   // "cuda"
	copiers []string // that only its devices can have
	ready   bool     // its library can be started and change nothing
	asked   bool     // the user has named its library, or one of its copiers
	flag    string   // by which its library was named; "" when it was not
	force   string   // the copier that its devices must use; "" when they may choose
	list    func() (int, error)
	open    func(i int) (*device.Accelerator, error)
	remedy  string // where an error has none
}

// copiers are the choices of the user.
func copiers() []string { return []string{"cuda", "libcudart", "libamdhip64", portable} }

const portable = "portable"

// devices adds a section for the host and for every accelerator.
func (r *Report) devices(ctx context.Context, m *Machine, o Options) error {
	h, err := device.OpenHost(device.HostOptions{Workers: 1}) // as the yardstick has
	if err != nil {
		r.Sections = append(r.Sections, Section{Title: "host", Findings: []Finding{red("device", sendReport, "%v", err)}})
		return ctx.Err()
	}
	defer func() { _ = h.Close() }() // all of its memory and streams are closed before
	r.Sections = append(r.Sections, host(ctx, h, o))
	began := time.Now()
	for _, v := range makers(m, o) {
		if ctx.Err() != nil {
			break
		}
		limit := max(leastAnswer, answerLimit-time.Since(began))
		r.Sections = append(r.Sections, answer(ctx, v, limit, func(ctx context.Context) []Section { return v.sections(ctx, m, h, o) })...)
	}
	return ctx.Err()
}

// answer returns what look finds, or that it did not come back.
func answer(ctx context.Context, v maker, limit time.Duration, look func(context.Context) []Section) []Section {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	found := make(chan []Section, 1)
	go func() { found <- look(ctx) }()
	select {
	case s := <-found:
		return s
	case <-ctx.Done():
		// Give it what a call to a healthy driver needs to end.
		select {
		case s := <-found:
			return s
		case <-time.After(time.Second):
		}
		return []Section{{Title: v.name, Findings: []Finding{
			red("library", readLog, "no answer in %s: the driver hangs", seconds(limit)),
		}}}
	}
}

// host says how the host copies.
func host(ctx context.Context, h *device.Host, o Options) Section {
	s := Section{Title: "host"}
	add := func(f Finding) { s.Findings = append(s.Findings, f) }
	choice, err := copier.Select(ctx, h, copier.SelectOptions{})
	if err != nil {
		add(red("copier", sendReport, "%v", err))
		return s
	}
	k := h.Kernels()
	add(green("copier", "%s; large jobs by %v", choice.Copier.Name(), k.Streamed))
	began := time.Now()
	a, b, err := twoPools(func() (*device.Memory, error) {
		m, err := h.Alloc(o.PoolBytes)
		if err != nil {
			return nil, err
		}
		return m, m.Populate(0, o.PoolBytes)
	})
	if err != nil {
		add(noPool(err))
		return s
	}
	defer free(a, b)
	took := time.Since(began)
	add(green("pool", "%s filled in %s, OS pages of %s", size(2*o.PoolBytes), seconds(took), size(int64(a.OSPageBytes()))))
	ways, end, err := between(h, a, b, [3]string{"one thread", "", "two threads"})
	if err == nil {
		ways = []way{ways[0], ways[2]}
		c := ceiling.Rate(ctx, ceiling.Pieces(a.Bytes(), b.Bytes(), int(2*o.PoolBytes)), 3)
		for i := range ways {
			ways[i].whole = c
		}
		s.Rates, err = measure(ctx, ways, share(o.Budget, 1))
		err = errors.Join(err, end())
		s.Whole = fmt.Sprintf("shares of Go's copy of 64 MiB pieces by one thread, %s GB/s", figure(c))
	}
	if err != nil && ctx.Err() == nil {
		add(red("copies", sendReport, "%v", err))
	}
	return s
}

// noPool says why there is no memory to measure in. That there is little of it was said
// before, and is nobody's fault; what the OS refuses is.
func noPool(err error) Finding {
	if _, refused := errors.AsType[unix.Errno](err); errors.Is(err, fault.Memory) && !refused {
		return yellow("pool", freeMemory, "nothing was measured: %v", err)
	}
	f := wrong("pool", freeMemory, err)
	f.Remedy = limitRemedy(err, f.Remedy)
	return f
}

// limitRemedy is the remedy for a limit of this process that err has run into, or else
// this one.
func limitRemedy(err error, otherwise string) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "allow this process more open files: ulimit -n 1024"
	case errors.Is(err, unix.EFBIG):
		return "allow this process files of any size, which its pools are: ulimit -f unlimited"
	}
	return otherwise
}

// share is how long one size may be measured one way on each of n devices.
func share(budget time.Duration, n int) time.Duration {
	measures := 3 * (len(copySizes()) + 1)
	return min(roundLimit, budget/time.Duration(2*n*measures))
}

// twoPools makes two memories, or none.
func twoPools(makeOne func() (*device.Memory, error)) (a, b *device.Memory, err error) {
	if a, err = makeOne(); err != nil {
		free(a)
		return nil, nil, err
	}
	if b, err = makeOne(); err != nil {
		free(a, b)
		return nil, nil, err
	}
	return a, b, nil
}

// free gives memories back that nothing uses any more.
func free(all ...*device.Memory) {
	for _, m := range all {
		if m != nil {
			_ = m.Free() // what a device that fails still holds is gone with this process
		}
	}
}

// sections says what there is of a vendor: nothing at all where there is none.
func (v maker) sections(ctx context.Context, m *Machine, h *device.Host, o Options) []Section {
	if !v.ready && !v.asked {
		return nil
	}
	n, err := v.list()
	if err != nil {
		f := wrong("library", v.remedy, err)
		if e := new(device.DriverError); v.flag != "" && !errors.As(err, &e) { // it is no driver that said so
			f.Remedy = strings.TrimSuffix(cmp.Or(fault.RemedyOf(err), "name the vendor's library"), ", or none: then it is looked for") +
				", or leave " + v.flag + " out"
		}
		return []Section{{Title: v.name, Findings: []Finding{f}}}
	}
	if n == 0 {
		return []Section{{Title: v.name, Findings: []Finding{
			red("devices", "show this process one: CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, or the container's settings", "a driver, and no device"),
		}}}
	}
	var all []Section
	for i := range n {
		// Each gets its part of what time there is, so that a slow one leaves some to the
		// others. A tenth of it is for giving back what was late.
		own, cancel := ctx, context.CancelFunc(func() {})
		if end, ok := ctx.Deadline(); ok {
			own, cancel = context.WithTimeout(ctx, time.Until(end)*9/10/time.Duration(n-i))
		}
		all = append(all, v.section(own, m, h, o, i, n))
		cancel()
	}
	return all
}

// trouble is f, of err, unless that came from a device that is lost, or from a lack of
// time.
func trouble(ctx context.Context, a *device.Accelerator, f Finding, err error) Finding {
	switch {
	case a.Lost() != nil:
		f.Level, f.Remedy, f.Text, f.kind = Red, readLog, a.Lost().Error(), fault.KindOf(a.Lost())
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		f.Level, f.Remedy, f.Text, f.kind = Yellow, measureLong, "not done in the time that there is for one device", 0
	}
	return f
}

// section looks at the i-th of n devices.
func (v maker) section(ctx context.Context, m *Machine, h *device.Host, o Options, i, n int) (s Section) {
	s.Title = fmt.Sprintf("%s:%d", v.name, i)
	add := func(f Finding) { s.Findings = append(s.Findings, f) }
	a, err := v.open(i)
	if err != nil {
		add(wrong("device", v.remedy, err))
		return s
	}
	ends := []func() error{a.Close} // of what is open, the last first
	defer func() {
		giveBack := func() (err error) {
			for _, end := range slices.Backward(ends) {
				err = errors.Join(err, end())
			}
			return err
		}
		if ctx.Err() != nil {
			go func() { _ = giveBack() }() // when the device has done its work, which may be never
		} else if err := giveBack(); err != nil && a.Lost() == nil {
			add(red("device", sendReport, "closing it: %v", err))
		}
	}()
	at := a.Attributes()
	add(model(at))
	for _, f := range libraries(a, o) {
		add(f)
	}
	found, crossovers := chosen(ctx, a, h, v.force, min(time.Second/2, o.Budget/time.Duration(16*n)))
	for _, f := range found {
		add(f)
	}
	s.Crossovers = crossovers
	add(m.exports(at))
	if ctx.Err() != nil || a.Lost() != nil {
		return s // that was said
	}

	began := time.Now()
	onHost, err := a.AllocHost(h, o.PoolBytes, o.PoolBytes)
	if err != nil {
		add(trouble(ctx, a, m.noPin(err), err))
		return s
	}
	ends = append(ends, onHost.Free)
	took := time.Since(began)
	add(green("pinning", "%s in %s, %s a GiB", size(o.PoolBytes), seconds(took), seconds(took*time.Duration((1<<30)/o.PoolBytes))))
	onDevice, err := a.Alloc(o.PoolBytes)
	if err != nil {
		add(trouble(ctx, a, yellow("memory", freeDevice, "%s: %v", size(o.PoolBytes), err), err))
		return s
	}
	ends = append(ends, onDevice.Free)
	ways, end, err := between(a, onHost, onDevice, [3]string{"host to device", "device to host", "both"})
	if err == nil {
		ends = append(ends, func() error { _ = end(); return nil }) // what went wrong, measure says
		s.Rates, err = measure(ctx, ways, share(o.Budget, 2*n))
		s.Whole = "shares of the same way in copies of 64 MiB"
	}
	if err != nil {
		add(trouble(ctx, a, red("copies", sendReport, "%v", err), err))
		return s
	}
	add(link(s.Rates, m.linkOf(at.PCI)))
	f, err := deviceIPC(a, v.name)
	add(trouble(ctx, a, f, err))
	return s
}

// noPin says why memory was not pinned. Nothing of the kernel's says what limits a driver:
// a limit on locking is what mostly does, where there is one.
func (m *Machine) noPin(err error) Finding {
	remedy := "no limit of this machine is in the way: look for what keeps the driver from it, such as confidential computing or a sandbox, and into the kernel's log (dmesg)"
	driver, ok := errors.AsType[*device.DriverError](err)
	switch {
	case !ok: // there was nothing to pin
		remedy = limitRemedy(err, freeMemory)
	case m.lock().Level != Green:
		remedy = "see locking above"
	case driver.Class == device.Retry || errors.Is(err, fault.Memory):
		remedy = freeMemory + "; if there is enough, the kernel's log (dmesg) says what the driver ran into"
	}
	return yellow("pinning", remedy, "%v: copies block, and are slow", err)
}

// wrong is red for err, with the remedy that it knows or else this one.
func wrong(name, remedy string, err error) Finding {
	if hint := fault.RemedyOf(err); hint != "" {
		remedy = hint
	}
	f := red(name, remedy, "%v", err)
	f.kind = fault.KindOf(err)
	return f
}

// model says which device it is.
func model(at device.Attributes) Finding {
	parts := []string{at.Model, size(at.Bytes), "driver " + at.Driver, at.PCI, at.UUID}
	if at.NUMANode >= 0 {
		parts = append(parts, fmt.Sprintf("at node %d", at.NUMANode))
	}
	parts = slices.DeleteFunc(parts, func(s string) bool { return s == "" })
	return green("device", "%s", strings.Join(parts, ", "))
}

// libraries says which libraries copy, and what the others lack.
func libraries(a *device.Accelerator, o Options) (found []Finding) {
	for _, e := range a.Engines() {
		l := e.Limits()
		text := fmt.Sprintf("%s %s", l.Library, l.Version)
		switch {
		case l.Batch > 0:
			text += fmt.Sprintf(", batches of up to %d", l.Batch)
		case l.NoBatch != "":
			text += ", no batches: " + l.NoBatch
		}
		found = append(found, green(e.Name(), "%s", text))
	}
	lacks, ok := a.Driver().(interface{ Missing() []device.MissingEngine })
	if !ok {
		return found
	}
	asked := map[string]string{"cuda": o.CUDA, "libcudart": o.CUDART, "libamdhip64": o.HIP}
	for _, e := range lacks.Missing() {
		f := green(e.Name, "not used: %v", e.Err)
		if asked[e.Name] != "" || o.Copier == e.Name { // the user wants this very one
			f.Level, f.Remedy, f.kind = Red, missingRemedy(e.Err), fault.KindOf(e.Err)
		}
		found = append(found, f)
	}
	return found
}

// missingRemedy is the remedy for a library that could not be used.
func missingRemedy(err error) string {
	if hint := fault.RemedyOf(err); hint != "" {
		return hint
	}
	if errors.Is(err, fault.Device) { // it can be opened, and is at odds with the driver
		return "name a runtime that finds this very driver and is no newer than it: it looks for libcuda.so.1 by itself; or none"
	}
	return "name a library that can be opened here, or none"
}

// chosen says which copier is used, and why not another, and what it copies how, as far
// as that can be measured in this time.
func chosen(ctx context.Context, a *device.Accelerator, h *device.Host, force string, budget time.Duration) (found []Finding, crossovers string) {
	s, err := copier.Select(ctx, a, copier.SelectOptions{Force: force, Host: h, Calibrate: &copier.CalibrateOptions{Budget: budget}})
	if err != nil {
		return []Finding{noCopier(ctx, a, force, err)}, ""
	}
	if n, _ := s.Crossovers.Measured(); n > 0 {
		crossovers = s.Crossovers.String()
	}
	for _, r := range s.Rejected {
		found = append(found, yellow("copier "+r.Name, sendReport, "not used: %v", r.Reason))
	}
	text := s.Copier.Name() + ", self-test passed"
	switch {
	case s.Copier.Name() == portable && force == "":
		return append(found, yellow("copier", "see why the others were not used", "%s: every row is a copy of its own", text)), ""
	case s.BatchOps > 0:
		text += fmt.Sprintf(", batches of %d", s.BatchOps)
	case s.NoBatches != nil && s.Copier.Name() != portable:
		text += ", no batches: " + strings.TrimPrefix(s.NoBatches.Error(), "batches: ")
	}
	return append(found, green("copier", "%s", text)), crossovers
}

// noCopier says why none was chosen.
func noCopier(ctx context.Context, a *device.Accelerator, force string, err error) Finding {
	remedy := sendReport
	switch {
	case errors.Is(err, fault.Memory):
		remedy = freeDevice
	case force != "":
		remedy = "leave --copier out, or give one that works here"
	}
	f := red("copier", remedy, "%v", err)
	f.kind = fault.KindOf(err)
	if f = trouble(ctx, a, f, err); f.Level == Yellow { // milliseconds would have been enough
		f.Level, f.Remedy = Red, readLog
		f.Text = "its self-test was " + f.Text
	}
	return f
}

// sharing is the finding about a device's memory in other processes.
const sharing = "sharing"

// exports says whether other processes can be given this device's memory.
func (m *Machine) exports(at device.Attributes) Finding {
	const name = sharing
	own := "processes of this container"
	if f := m.pidNamespace(); f.Level == Green {
		own = "processes of this machine"
	}
	reach, why := m.reach()
	fdErr := m.TakeFD()
	byFD := "by descriptor: no, the device can't"
	switch {
	case !at.VMM:
	case !reach:
		byFD = "by descriptor: no, " + why
	case fdErr != nil:
		byFD = "by descriptor: no, " + fdErr.Error()
	default:
		byFD = "by descriptor: yes"
	}
	if !at.IPC {
		return yellow(name, "let the engine's cache be copied through host memory", "by handle: no, the device can't; %s", byFD)
	}
	return green(name, "by handle: yes, with %s; %s", own, byFD)
}

// linkOf returns what the slot of the card at address carries, 0 when not known.
func (m *Machine) linkOf(address string) float64 {
	for _, c := range m.pciCards() {
		if c.address == address {
			return c.link
		}
	}
	return 0
}

// link compares the best rate with what the slot carries.
func link(rates []Rate, slot float64) Finding {
	const name = "link"
	best := 0.0
	for _, r := range rates {
		if r.Way != "both" {
			best = max(best, r.GBs)
		}
	}
	switch {
	case slot == 0:
		return green(name, "%s GB/s at best; what the slot carries is not known", figure(best))
	case best < slot/2:
		return yellow(name, "see that nothing else copies; look at NUMA, at virtualization (ACS, IOMMU), and at the slot that the card is in",
			"%s GB/s at best, of %s that the slot carries", figure(best), figure(slot))
	}
	return green(name, "%s GB/s at best, of %s that the slot carries", figure(best), figure(slot))
}
