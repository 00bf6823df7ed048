package tcp

import (
	"bytes"
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/internal/leaktest"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// testKey is a key for tests.
func testKey() []byte { return bytes.Repeat([]byte{7}, MinKeyBytes) }

// mode is a way to speak.
type mode struct {
	name string
	o    Options
}

func modes() []mode {
	return []mode{
		{"plain", Options{}},
		{"TLS", Options{TLS: true}},
		{"plain, unchecked, one connection", Options{Unchecked: true, Streams: 1}},
	}
}

// sides are what a mode's owners and readers stand on.
func (m mode) sides() (owner, reader func() (transfertest.Side, error)) {
	make := func(listen string) func() (transfertest.Side, error) {
		return func() (transfertest.Side, error) {
			o := m.o
			o.Key, o.Listen = testKey(), listen
			e, err := New(o)
			return transfertest.Side{Engine: e}, err
		}
	}
	return make("127.0.0.1:0"), make("")
}

func TestMain(m *testing.M) {
	roles := map[string]func() (transfertest.Side, error){}
	for _, m := range modes() {
		roles[m.name], _ = m.sides()
	}
	transfertest.Child(roles)
	leaktest.Main(m)
}

func TestEngine_PassesTheSuite(t *testing.T) {
	for _, m := range modes() {
		owner, reader := m.sides()
		t.Run(m.name, func(t *testing.T) { transfertest.Run(t, transfertest.Harness{Owner: owner, Reader: reader}) })
	}
}

func TestEngine_PassesTheSuiteInTwoProcesses(t *testing.T) {
	for _, m := range modes() {
		_, reader := m.sides()
		t.Run(m.name, func(t *testing.T) { transfertest.Run(t, transfertest.Harness{Role: m.name, Reader: reader}) })
	}
}

// A reader whose pages are a device's reads them by way of host memory.
func TestEngine_PassesTheSuiteIntoADevice(t *testing.T) {
	owner, reader := modes()[0].sides()
	transfertest.Run(t, transfertest.Harness{Owner: owner, Reader: func() (transfertest.Side, error) {
		s, err := reader()
		if err != nil {
			return s, err
		}
		d := devicetest.NewDriver(devicetest.Options{Mode: devicetest.Lazy})
		a, err := device.OpenAccelerator(d, device.AcceleratorOptions{})
		if err != nil {
			return s, err
		}
		s.Device, s.Copier = a, copier.NewAccelerated(a, a.Engines()[0], copier.AcceleratedOptions{})
		s.Close = func() error {
			defer d.Check(t)
			return a.Close()
		}
		return s, nil
	}})
}
