// Package copiertest is the suite that every copier passes, unchanged: the same
// geometries, the same lists of pages, every byte of both caches compared, the
// untouched ones included.
//
// The contents of a cache are a function of (cache, page, layer, plane, offset), so
// that nothing has to be remembered and a foreign byte shows whose it is. What a
// copy should have done is worked out from the geometry's plain fields, not by the
// code under test.
package copiertest

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
)

// Harness is one copier under test and the device that it is made for. What may be left
// out takes the cases that need it along, and they say so.
type Harness struct {
	Copier copier.Copier
	Device device.Device

	// Hold holds a stream back until release is called. May be left out.
	Hold func(device.Stream) (release func())

	// Fail makes the next copy on a stream fail when its turn comes, and returns what
	// its error must wrap. FailsDevice says that no other stream is well then either.
	// May be left out.
	Fail        func(device.Stream) (want error)
	FailsDevice bool

	// Lose makes the device be lost, with all that is in flight on it. May be left out.
	Lose func()

	// Foreign is a stream of another device, which no copy may go on. May be left out.
	Foreign device.Stream

	// AllocHost returns host memory that the device reaches. Without it both sides of a
	// route are memory of Device; with it, either or both are.
	AllocHost func(bytes int64) (*device.Memory, error)

	// Write and Read move bytes between the test and idle memory. They may be left out
	// when the host can address the device's memory.
	Write func(m *device.Memory, off int64, b []byte) error
	Read  func(m *device.Memory, off int64, b []byte) error
}

// Run runs the suite. open is called once a test, and cleans up after itself.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	for name, test := range map[string]func(*testing.T, Harness){
		"EveryByteOfEveryPlan":              everyPlan,
		"RandomPlansMatchTheReference":      randomPlans,
		"TenThousandPages":                  manyPages,
		"ReportsWhatItMoved":                reportsMoved,
		"RefusesBeforeAnythingIsEnqueued":   refusesWhole,
		"RefusesCachesThatCross":            refusesCrossing,
		"RefusesStreamsOfOtherDevices":      refusesForeign,
		"OnlyEnqueues":                      onlyEnqueues,
		"ReadingBeforeTheTicketSeesOldData": negativeControl,
		"KeepsItsPlaceAmongEvents":          ordered,
		"RowsOfATokenRange":                 tokenRanges,
		"RowsWithAnyPitch":                  rowsWithPitch,
		"RefusesBadRows":                    refusesRows,
		"NothingToDo":                       nothingToDo,
		"FailedStreamFailsTheTicket":        failedStream,
		"LostDeviceFailsTheTicket":          lostDevice,
		"MemoryStaysUntilTheTicket":         heldMemory,
		"ClosedStreamIsRefused":             closedStream,
		"ManyGoroutines":                    manyGoroutines,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

// place says which sides of a route are host memory.
type place struct {
	name     string
	dst, src bool
}

// places are those that h can have.
func (h *Harness) places() []place {
	if h.AllocHost == nil {
		return []place{{name: "device_to_device"}}
	}
	return []place{{"device_to_host", true, false}, {"host_to_device", false, true}, {"device_to_device", false, false}}
}

// rig is one route opened on the device.
type rig struct {
	t        *testing.T
	h        Harness
	s        device.Stream
	dst, src *kv.Cache
	route    *kv.Route
}

// open opens a route onto the host, where there is one.
func open(t *testing.T, h Harness, dst, src func() (*kv.Geometry, error)) *rig {
	t.Helper()
	return openAt(t, h, h.places()[0], dst, src)
}

func openAt(t *testing.T, h Harness, p place, dst, src func() (*kv.Geometry, error)) *rig {
	t.Helper()
	r := &rig{t: t, h: h}
	r.dst, r.src = r.cache("destination", p.dst, dst), r.cache("source", p.src, src)
	r.s = r.stream("copies")
	var err error
	if r.route, err = kv.NewRoute(r.dst, r.src); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) cache(side string, onHost bool, geometry func() (*kv.Geometry, error)) *kv.Cache {
	r.t.Helper()
	g, err := geometry()
	if err != nil {
		r.t.Fatalf("%s: %v", side, err)
	}
	var regions []*device.Memory
	for i := range g.Regions() {
		regions = append(regions, r.memory(onHost, g.Spec().RegionBytes[i]))
		r.write(regions[i], pattern(side, i, regions[i].Size()))
	}
	c, err := kv.Wrap(g, regions)
	if err != nil {
		r.t.Fatalf("%s: %v", side, err)
	}
	return c
}

func (r *rig) memory(onHost bool, n int64) *device.Memory {
	r.t.Helper()
	alloc := r.h.Device.Alloc
	if onHost {
		alloc = r.h.AllocHost
	}
	m, err := alloc(n)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = m.Free() }) // the device tells what stays behind
	return m
}

func (r *rig) stream(name string) device.Stream {
	r.t.Helper()
	s, err := r.h.Device.NewStream(name)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = s.Close() }) // a case may have failed it or closed it
	return s
}

// hold holds the rig's stream back, until release is called or the case ends.
func (r *rig) hold() (release func()) {
	r.t.Helper()
	if r.h.Hold == nil {
		r.t.Skip("this harness cannot hold a stream back")
	}
	release = r.h.Hold(r.s)
	r.t.Cleanup(release)
	return release
}

// pattern is the content of one region: every 8 bytes name side, region and place.
func pattern(side string, region int, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		x := uint64(i/8)*0x9e3779b97f4a7c15 + uint64(region+1)*0xd1342543de82ef95 + uint64(len(side))*0xaf251af3b0f025b5
		b[i] = byte(x >> (8 * (i % 8)))
	}
	return b
}

func (r *rig) write(m *device.Memory, b []byte) {
	r.t.Helper()
	if to := m.Bytes(); to != nil {
		copy(to, b)
	} else if err := r.h.Write(m, 0, b); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) bytes(m *device.Memory) []byte {
	r.t.Helper()
	b := make([]byte, m.Size())
	if from := m.Bytes(); from != nil {
		copy(b, from)
	} else if err := r.h.Read(m, 0, b); err != nil {
		r.t.Fatal(err)
	}
	return b
}

// read returns the bytes of all regions of c.
func (r *rig) read(c *kv.Cache) [][]byte {
	r.t.Helper()
	var all [][]byte
	for i := range c.Geometry().Regions() {
		m, _ := c.Region(i)
		all = append(all, r.bytes(m))
	}
	return all
}

// expect returns the destination's regions after pairs were copied, worked out
// plane by plane from the plain fields of both geometries.
func (r *rig) expect(pairs []page.Pair) [][]byte {
	r.t.Helper()
	want, src := r.read(r.dst), r.read(r.src)
	d, s := r.dst.Geometry().Spec(), r.src.Geometry().Spec()
	from := map[int]kv.Layer{}
	for _, l := range s.Layers {
		from[l.ID] = l
	}
	for _, dl := range d.Layers {
		for _, dp := range dl.Planes {
			for _, sp := range from[dl.ID].Planes {
				if dp.Kind != sp.Kind {
					continue
				}
				for _, x := range pairs {
					copy(want[dp.Region][dp.Offset+int64(x.Dst)*dp.PageStride:][:dp.Bytes],
						src[sp.Region][sp.Offset+int64(x.Src)*sp.PageStride:][:sp.Bytes])
				}
			}
		}
	}
	return want
}

// copyAndWait copies pairs and waits for a ticket.
func (r *rig) copyAndWait(pairs []page.Pair) (copier.Moved, error) {
	return r.copyBy(r.h.Copier.Copy, pairs)
}

type pageCopy func(s device.Stream, r *kv.Route, pairs []page.Pair) (copier.Moved, error)

func (r *rig) copyBy(do pageCopy, pairs []page.Pair) (copier.Moved, error) {
	moved, err := do(r.s, r.route, append([]page.Pair(nil), pairs...))
	if err != nil {
		return moved, err
	}
	ticket := device.NewTicket()
	if err := r.s.Signal(ticket); err != nil {
		return moved, err
	}
	return moved, ticket.Wait(r.t.Context())
}

// sealed is how the copier copies sealed pages, if that is another way.
func (h *Harness) sealed() (pageCopy, bool) {
	c, ok := h.Copier.(sealer)
	if !ok {
		return nil, false
	}
	return c.CopySealed, true
}

func (r *rig) compare(what string, c *kv.Cache, want [][]byte) {
	r.t.Helper()
	for i, got := range r.read(c) {
		if bytes.Equal(got, want[i]) {
			continue
		}
		for at := range got {
			if got[at] != want[i][at] {
				r.t.Fatalf("%s: region %d, byte %d is %#x, want %#x", what, i, at, got[at], want[i][at])
			}
		}
	}
}

func (r *rig) sync(streams ...device.Stream) {
	r.t.Helper()
	for _, s := range streams {
		if err := s.Sync(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r *rig) pages() int { return min(r.dst.Pages(), r.src.Pages()) }

// is reports whether err is any of kinds.
func is(err error, kinds ...error) bool {
	for _, k := range kinds {
		if errors.Is(err, k) {
			return true
		}
	}
	return false
}
