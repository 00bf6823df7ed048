package bench

import (
	"fmt"
	"strconv"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
)

func sectionTitle(name string) string {
	switch name {
	case inProcess:
		return "local: pages of another cache in this process"
	case engines.HostIPC:
		return "hostipc: pages of another process, whose memory is mapped here"
	case engines.TCP:
		return "tcp: pages of another process over loopback"
	case tlsVariant:
		return "tcp with TLS 1.3: the same, encrypted"
	}
	return name + ", by TCP over loopback"
}

// transferTimes are the seconds of one shape, run by run.
type transferTimes struct {
	clock             string
	shape             transferShape
	bytes, pieceBytes int64
	r, summed, c, raw []float64
	ours              map[string][2][]float64 // without and with checksums of pages
}

// lines are those of a variant: without and with checksums of pages.
func (m *transferTimes) lines(name string) (out []Line) {
	order := "scattered"
	if m.shape.Run > 1 {
		order = "runs of " + strconv.Itoa(m.shape.Run)
	}
	gb := gbps(m.bytes)
	for i, checks := range []string{"page sums off", "page sums on"} {
		ours := each(m.ours[name][i], gb)
		l := newLine(fmt.Sprintf("%-7s  %-10s  %s", size(m.shape.PageBytes), order, checks), statOf(ours), map[string]any{
			"engine": name, "page_bytes": m.shape.PageBytes, "run": m.shape.Run, "page_sums": i == 1, "clock": m.clock,
		})
		l.Bytes = &m.bytes
		l.against("C", ours, each(m.c, gbps(m.pieceBytes)))
		r := m.r
		if i == 1 {
			r = m.summed
		}
		l.against("R", ours, each(r, gb))
		m.beside(&l, name, i, ours)
		out = append(out, l)
	}
	return out
}

// beside adds what a variant is held against besides the ceilings, and the goals.
func (m *transferTimes) beside(l *Line, name string, i int, ours []float64) {
	gb := gbps(m.bytes)
	other := func(label, of string) bool {
		times, ok := m.ours[of]
		if ok {
			l.against(label, ours, each(times[i], gb))
		}
		return ok
	}
	switch name {
	case engines.HostIPC:
		other("local", inProcess)
		if m.shape.PageBytes >= 64<<10 {
			l.atLeast("R", 0.95)
		}
	case engines.TCP:
		l.against("raw", ours, each(m.raw, gb))
		if i == 0 {
			l.atLeast("raw", 0.9)
		}
		if other("mooncake", childVariant) && i == 0 {
			l.atLeast("mooncake", 1.3)
		}
	case tlsVariant:
		other("plain", engines.TCP)
	case childVariant:
		if other("in process", inProcessVariant) && i == 0 {
			l.atLeast("in process", 0.95)
		}
	}
}
