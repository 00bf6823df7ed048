package doctor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer/hostipc"
	"github.com/kvferry/kvferry/transfer/tcp"
)

func TestTransfers_SayWhatIsInTheWay(t *testing.T) {
	never := errors.New("operation not permitted")
	ipc := func(sharing, process error) Finding {
		m := &Machine{HostIPC: func(context.Context) hostipc.Report {
			return hostipc.Report{Dir: "/run/kvferry", Sharing: sharing, Process: process}
		}}
		return m.hostIPC(t.Context())
	}
	loop := func(err error) Finding {
		m := &Machine{TCP: func(context.Context) (tcp.Report, error) { return tcp.Report{RoundTrip: 80 * time.Microsecond}, err }}
		return m.tcp(t.Context())
	}
	for name, x := range map[string]struct {
		f      Finding
		level  Level
		text   string
		remedy string
	}{
		"all is well":      {ipc(nil, nil), Green, "by sockets in /run/kvferry; memory that is no memfd is read by process_vm_readv", ""},
		"no other process": {ipc(nil, never), Green, "nothing can be read: operation not permitted", ""},
		"no /proc":         {ipc(fault.New(fault.Unsupported, "fd", "no").Hint("mount /proc"), nil), Yellow, "can't be handed", "mount /proc"},
		"a limit of files": {ipc(unix.EMFILE, nil), Yellow, "too many open files", "ulimit -n"},
		"no memfd":         {ipc(never, nil), Yellow, "can't be handed", "tcp"},
		"TCP":              {loop(nil), Green, "reached in 80 µs; both sides need one key (kvferry transfer key", ""},
		"no interface":     {loop(never), Yellow, "by 127.0.0.1 fails", "interface lo"},
		"no library of Mooncake": {
			mooncakeEngine(t.Context(), nil), Green, "--mooncake-library names its library", "",
		},
		"a library that is not there": {
			mooncakeEngine(t.Context(), []string{"/nonexistent/libtransfer_engine.so"}), Red, "/nonexistent", "",
		},
	} {
		if x.f.Level != x.level || !strings.Contains(x.f.Text, x.text) || !strings.Contains(x.f.Remedy, x.remedy) || (x.level == Green) != (x.f.Remedy == "") {
			t.Errorf("%s: %+v", name, x.f)
		}
	}
}

// TestMachine_TransfersHere tries what the doctor tries, on this machine.
func TestMachine_TransfersHere(t *testing.T) {
	m := ThisMachine()
	_, err := m.TCP(t.Context())
	if err := errors.Join(m.HostIPC(t.Context()).Sharing, err); err != nil {
		t.Error(err)
	}
}

func TestDeviceEngines_AreWhatTheDevicesSaid(t *testing.T) {
	shares, doesNot := green(sharing, "yes"), yellow(sharing, "other", "no")
	section := func(title string, f Finding) Section {
		return Section{Title: title, Findings: []Finding{green("device", "x"), f}}
	}
	found := deviceEngines([]Section{section("cuda:0", shares), section("cuda:1", shares), section("hip:0", doesNot), section("hip:1", shares), section("host", shares)})
	for i, want := range []Finding{
		green("cudaipc", "cuda:0, cuda:1: with processes on the same device"),
		yellow("hipipc", found[1].Remedy, "not hip:0; but hip:1"),
	} {
		if found[i] != want {
			t.Errorf("got  %+v\nwant %+v", found[i], want)
		}
	}
	// What was tried counts for more than what the device says.
	tried := Section{Title: "cuda:0", Findings: []Finding{shares, yellow("cudaipc", "other", "no")}}
	if found = deviceEngines([]Section{tried}); found[0].Text != "not cuda:0; and no other" {
		t.Errorf("got %+v", found)
	}
	if found = deviceEngines(nil); found[0].Level != Green || found[1].Text != "no device of hip was opened" {
		t.Errorf("got %+v", found)
	}
	if found = deviceEngines([]Section{section("cuda:0", doesNot)}); found[0].Text != "not cuda:0; and no other" || found[0].Remedy == "" {
		t.Errorf("got %+v", found)
	}
}
