package engines

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// onHostDevice and onAccelerator are what pages lie on; nothing here is opened.
func onHostDevice(t *testing.T) *accel.Opened {
	t.Helper()
	x, err := accel.Open(t.Context(), "", accel.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	})
	return x
}

func onAccelerator(host *accel.Opened, name string) *accel.Opened {
	return &accel.Opened{Device: named{host.Device, name}, Accelerator: new(device.Accelerator), Host: host.Host}
}

type named struct {
	device.Device
	name string
}

func (n named) Name() string { return n.name }

func TestChoose_TakesWhatTheFlagsAllow(t *testing.T) {
	host := onHostDevice(t)
	gpu, amd := onAccelerator(host, "cuda:0"), onAccelerator(host, "hip:1")
	key := Options{KeyFile: "key"}
	all := Options{KeyFile: "key", Mooncake: []string{"lib.so"}}
	for _, tc := range []struct {
		o    Options
		side Side
		x    *accel.Opened
		want string
	}{
		{Options{}, Owner, host, "hostipc"},
		{Options{}, Reader, host, "hostipc"},
		{key, Owner, host, "hostipc tcp"},
		{all, Owner, host, "hostipc mooncake tcp"},
		{Options{Names: []string{TCP, HostIPC}, KeyFile: "key"}, Owner, host, "tcp hostipc"},
		{Options{}, Owner, gpu, "cudaipc"},
		{Options{}, Owner, amd, "hipipc"},
		{all, Reader, gpu, "cudaipc hostipc mooncake tcp"}, // into a device's memory anything can be read
		{Options{}, Reader, amd, "hipipc hostipc"},
	} {
		chosen, err := choose(&tc.o, tc.side, tc.x)
		var names []string
		for _, e := range chosen {
			names = append(names, e.name)
		}
		if got := strings.Join(names, " "); err != nil || got != tc.want {
			t.Errorf("%+v of side %d on %s: %q, %v, want %q", tc.o, tc.side, tc.x.Device.Name(), got, err, tc.want)
		}
	}
}

func TestChoose_RefusesWhatHasNoEffect(t *testing.T) {
	host := onHostDevice(t)
	gpu := onAccelerator(host, "cuda:0")
	for _, tc := range []struct {
		o            Options
		x            *accel.Opened
		text, remedy string
	}{
		{Options{Names: []string{"pigeon"}}, host, `no such choice: "pigeon"`, "hostipc"},
		{Options{Names: []string{HostIPC, HostIPC}}, host, "twice", "once"},
		{Options{Names: []string{TCP}}, host, "needs a key", "kvferry transfer key"},
		{Options{Names: []string{Mooncake}}, host, "library was not named", "--mooncake-library"},
		{Options{Names: []string{CUDAIPC}}, host, "no device of cuda", "--device cuda:0"},
		{Options{Names: []string{HIPIPC}}, gpu, "no device of hip", "--device hip:0"},
		{Options{Names: []string{HostIPC}}, gpu, "memory of cuda:0", "--device"},
		{Options{Listen: "127.0.0.1:0"}, host, "--listen: has no effect without tcp", "kvferry transfer key"},
		{Options{TLS: true, Names: []string{HostIPC}}, host, "--tls: has no effect without tcp", "add tcp"},
		{Options{KeyFile: "key", Names: []string{HostIPC}}, host, "--key-file", "add tcp"},
		{Options{KeyFile: "key"}, gpu, "--key-file: has no effect", ""},
		{Options{MooncakeListen: "::1"}, host, "--mooncake-listen: has no effect", "--mooncake-library"},
	} {
		_, err := choose(&tc.o, Owner, tc.x)
		if !errors.Is(err, fault.Invalid) || !strings.Contains(err.Error(), tc.text) || !strings.Contains(fault.RemedyOf(err), tc.remedy) {
			t.Errorf("%+v: %v, %q", tc.o, err, fault.RemedyOf(err))
		}
	}
}

func TestSet_SaysWhereItIsReachedAndHow(t *testing.T) {
	host := onHostDevice(t)
	key := filepath.Join(t.TempDir(), "key")
	if err := NewKeyFile(key); err != nil {
		t.Fatal(err)
	}
	if err := NewKeyFile(key); !errors.Is(err, fault.Exists) || fault.RemedyOf(err) == "" {
		t.Errorf("a key that is there: %v", err)
	}
	s, err := Open(t.Context(), Options{KeyFile: key, TLS: true, Mooncake: []string{"a.so", "b.so"}}, Owner, host)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if got := s.Names(); !slices.Equal(got, []string{HostIPC, Mooncake, TCP}) {
		t.Errorf("engines %q", got)
	}
	reached := strings.Join(s.Reached(), "; ")
	for _, want := range []string{"hostipc (this host)", "mooncake on 127.0.0.1 (open to all", "tcp on 127.0.0.1:", "TLS 1.3"} {
		if !strings.Contains(reached, want) {
			t.Errorf("no %q in %q", want, reached)
		}
	}
	quoted := func(s string) string { return "<" + s + ">" }
	if got, want := strings.Join(s.ReadFlags(s.Names(), quoted), " "), "--mooncake-library <a.so,b.so> --key-file <"+key+"> --tls"; got != want {
		t.Errorf("flags of a reader %q, want %q", got, want)
	}
	if len(s.Warnings) != 1 || len(s.Far()) > 0 {
		t.Errorf("warnings %q, far %v", s.Warnings, s.Far())
	}
	s.o.Listen = "10.1.2.3:7700"
	if far := s.Far(); !slices.Equal(far, []string{TCP}) {
		t.Errorf("on other hosts readers use %q", far)
	}
	if got, want := strings.Join(s.ReadFlags(s.Far(), quoted), " "), "--key-file <"+key+"> --tls"; got != want {
		t.Errorf("flags of a reader on another host %q, want %q", got, want)
	}
	r, err := Open(t.Context(), Options{}, Reader, host)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Missing([]string{TCP, Mooncake}); !strings.Contains(got, "kvferry transfer key") || !strings.Contains(got, "--mooncake-library") {
		t.Errorf("missing: %q", got)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func TestOpen_SaysWhichFlagIsWrong(t *testing.T) {
	host := onHostDevice(t)
	key := filepath.Join(t.TempDir(), "key")
	if err := NewKeyFile(key); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		o    Options
		kind fault.Kind
		text string
	}{
		{Options{KeyFile: key + "2"}, fault.NotFound, "--key-file"},
		{Options{KeyFile: key, Listen: "0.0.0.0:0"}, fault.Invalid, "--listen 0.0.0.0:0"},
		{Options{Mooncake: []string{"a.so"}, MooncakeListen: "everywhere"}, fault.Invalid, "mooncake"},
	} {
		s, err := Open(t.Context(), tc.o, Owner, host)
		if s != nil || !errors.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.text) || fault.RemedyOf(err) == "" {
			t.Errorf("%+v: %v, remedy %q", tc.o, err, fault.RemedyOf(err))
		}
		if strings.Contains(fault.RemedyOf(err), "tcp.") {
			t.Errorf("a remedy for programmers: %q", fault.RemedyOf(err))
		}
	}
	for address, want := range map[string]bool{
		"": true, "127.0.0.1:0": true, "localhost:7": true, "[::1]:7": true, "::1": true, "10.0.0.1:7": false, "node7:7": false, "10.0.0.1": false,
	} {
		if loopback(address) != want {
			t.Errorf("%q: %v", address, !want)
		}
	}
}
