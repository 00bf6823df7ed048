package gpucheck

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/copier/copiertest"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/device/hip"
	"github.com/kvferry/kvferry/internal/fakedriver"
	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// named is the device to test, "" for the fakes.
func named() string { return os.Getenv("KVFERRY_GPU") }

// onDevices runs test on the device that is named, or on a fake of each vendor.
func onDevices(t *testing.T, test func(t *testing.T, vendor string)) {
	if name := named(); name != "" {
		vendor, _, err := accel.Parse(name)
		if err != nil {
			t.Fatal(err)
		}
		test(t, vendor)
		return
	}
	for _, vendor := range []string{accel.CUDA, accel.HIP} {
		t.Run(vendor, func(t *testing.T) { test(t, vendor) })
	}
}

// open opens the device under test; newest is the newest interface of CUDA that is used,
// 0 for the driver's own. close is for tests that do not close it themselves.
func open(t *testing.T, vendor string, newest int) (a *device.Accelerator) {
	t.Helper()
	which := "0"
	var co cuda.Options
	var ho hip.Options
	if name := named(); name != "" {
		_, which, _ = strings.Cut(name, ":")
		co.Library, co.Runtime, ho.Library = os.Getenv("KVFERRY_CUDA_LIBRARY"), os.Getenv("KVFERRY_CUDART_LIBRARY"), os.Getenv("KVFERRY_HIP_LIBRARY")
	} else if vendor == accel.CUDA {
		f := fakedriver.Load(t, fakedriver.Options{Delay: -1})
		co.Library, co.Runtime = f.Path(), f.Runtime()
	} else {
		ho.Library = fakedriver.Load(t, fakedriver.Options{Vendor: fakedriver.HIP, Delay: -1}).Path()
	}
	var err error
	if vendor == accel.CUDA {
		co.Newest = newest
		a, err = cuda.Open(which, co)
	} else {
		a, err = hip.Open(which, ho)
	}
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func closing(t *testing.T, close func() error) {
	t.Helper()
	t.Cleanup(func() {
		t.Helper()
		if err := close(); err != nil {
			t.Error(err)
		}
	})
}

func openHost(t *testing.T) *device.Host {
	t.Helper()
	h, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		t.Fatal(err)
	}
	closing(t, h.Close)
	return h
}

// moves write and read device memory by the device's own copies.
func moves(t *testing.T, a *device.Accelerator) (write, read func(m *device.Memory, off int64, b []byte) error) {
	write = func(m *device.Memory, off int64, b []byte) error {
		devicetest.Write(t, a, m, off, b)
		return nil
	}
	read = func(m *device.Memory, off int64, b []byte) error {
		copy(b, devicetest.Read(t, a, m, off, int64(len(b))))
		return nil
	}
	return write, read
}

// staged is moves with one stage for all of them, which stays until the test ends.
func staged(t *testing.T, host *device.Host, a *device.Accelerator) (write, read func(m *device.Memory, off int64, b []byte) error) {
	t.Helper()
	const most = 8 << 20
	stage, err := a.AllocHost(host, most, 1)
	if err != nil {
		t.Fatal(err)
	}
	closing(t, stage.Free)
	s, err := a.NewStream("stage")
	if err != nil {
		t.Fatal(err)
	}
	closing(t, s.Close)
	run := func(op device.Op) error {
		return errors.Join(s.Copy([]device.Op{op}), s.Sync(context.Background()))
	}
	write = func(m *device.Memory, off int64, b []byte) error {
		for part := range slices.Chunk(b, most) {
			n := int64(copy(stage.Bytes(), part))
			if err := run(device.Op{Dst: m, DstOff: off, Src: stage, Bytes: n}); err != nil {
				return err
			}
			off += n
		}
		return nil
	}
	read = func(m *device.Memory, off int64, b []byte) error {
		for part := range slices.Chunk(b, most) {
			if err := run(device.Op{Dst: stage, Src: m, SrcOff: off, Bytes: int64(len(part))}); err != nil {
				return err
			}
			off += int64(copy(part, stage.Bytes()))
		}
		return nil
	}
	return write, read
}

// TestReal_Device is the conformance suite of devices, without the cases that hold
// streams back or make copies fail: no real device can.
func TestReal_Device(t *testing.T) {
	onDevices(t, func(t *testing.T, vendor string) {
		devicetest.Run(t, func(t *testing.T) devicetest.Harness {
			host, a := openHost(t), open(t, vendor, 0)
			write, read := moves(t, a)
			return devicetest.Harness{
				Device: a, Write: write, Read: read,
				Host: func(n int64) (*device.Memory, error) { return a.AllocHost(host, n, 1) },
			}
		})
	})
}

// TestReal_Copiers is the conformance suite of copiers, for every engine of the device,
// as its defaults have it and with rectangles alone, and for the portable copier.
func TestReal_Copiers(t *testing.T) {
	onDevices(t, func(t *testing.T, vendor string) {
		a := open(t, vendor, 0)
		var engines []string
		for _, e := range a.Engines() {
			engines = append(engines, e.Name())
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		run := func(name string, use func(a *device.Accelerator) copier.Copier) {
			t.Run(name, func(t *testing.T) {
				copiertest.Run(t, func(t *testing.T) copiertest.Harness {
					host, a := openHost(t), open(t, vendor, 0)
					closing(t, a.Close)
					write, read := staged(t, host, a)
					return copiertest.Harness{
						Copier: use(a), Device: a, Write: write, Read: read,
						AllocHost: func(n int64) (*device.Memory, error) { return a.AllocHost(host, n, 1) },
					}
				})
			})
		}
		for i, name := range engines {
			run(name, func(a *device.Accelerator) copier.Copier {
				return copier.NewAccelerated(a, a.Engines()[i], copier.AcceleratedOptions{})
			})
			run(name+"/rectangles", func(a *device.Accelerator) copier.Copier {
				return copier.NewAccelerated(a, a.Engines()[i], copier.AcceleratedOptions{Crossovers: new(copier.Crossovers)})
			})
		}
		run("portable", func(*device.Accelerator) copier.Copier { return copier.NewPortable() })
	})
}

// TestReal_Selection puts every engine through the self-test, and calibrates the one that
// is chosen. What was found is in the log.
func TestReal_Selection(t *testing.T) {
	onDevices(t, func(t *testing.T, vendor string) {
		host, a := openHost(t), open(t, vendor, 0)
		closing(t, a.Close)
		for _, e := range a.Engines() {
			s, err := copier.Select(context.Background(), a, copier.SelectOptions{Force: e.Name(), Host: host})
			if err != nil {
				t.Errorf("%s: %v", e.Name(), err)
				continue
			}
			t.Logf("%s: %v", e.Name(), s)
		}
		s, err := copier.Select(context.Background(), a, copier.SelectOptions{Host: host, Calibrate: &copier.CalibrateOptions{}})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("chosen: %v\n%v", s, &s.Crossovers)
		if len(s.Rejected) > 0 && named() == "" {
			t.Errorf("rejected: %v", s.Rejected)
		}
	})
}

// TestReal_BatchForms copies thousands of scattered rows by batches in both forms that
// CUDA's have had: of nine words, and of eight.
func TestReal_BatchForms(t *testing.T) {
	onDevices(t, func(t *testing.T, vendor string) {
		forms := map[string]int{"own": 0}
		if vendor == accel.CUDA {
			forms = map[string]int{"nine": 12080, "eight": 0}
		}
		for name, newest := range forms {
			t.Run(name, func(t *testing.T) {
				host, a := openHost(t), open(t, vendor, newest)
				closing(t, a.Close)
				e := a.Engines()[0]
				if e.Limits().Batch == 0 {
					t.Skipf("no batches: %s", e.Limits().NoBatch)
				}
				t.Logf("%s %s", e.Limits().Library, e.Limits().Version)
				checkBatch(t, host, a, e)
			})
		}
	})
}

// checkBatch copies rows down, each to the place of another, and compares all bytes.
func checkBatch(t *testing.T, host *device.Host, a *device.Accelerator, e device.Engine) {
	const n, row = 20_011, 512 // a prime: steps of any size visit all rows
	near, err := a.AllocHost(host, n*row, 1)
	if err != nil {
		t.Fatal(err)
	}
	closing(t, near.Free)
	far, err := a.Alloc(n * row)
	if err != nil {
		t.Fatal(err)
	}
	closing(t, far.Free)
	s, err := a.NewStream("batches")
	if err != nil {
		t.Fatal(err)
	}
	closing(t, s.Close)
	at := func(i int) int64 { return int64(i*7919%n) * row }
	for i := range n {
		copy(near.Bytes()[i*row:][:row], fmt.Sprintf("row %d", i))
	}
	want := bytes.Clone(near.Bytes())
	up, down := make([]device.Op, n), make([]device.Op, n)
	for i := range n {
		up[i] = device.Op{Dst: far, DstOff: at(i), Src: near, SrcOff: int64(i) * row, Bytes: row}
		down[i] = device.Op{Dst: near, DstOff: int64(i) * row, Src: far, SrcOff: at(i), Bytes: row}
	}
	for _, most := range []int{0, 1000} {
		before := a.Calls()
		if err := a.CopyBatch(s, e, up, device.AnyOrder, most); err != nil {
			t.Fatal(err)
		}
		if err := s.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		clear(near.Bytes())
		if err := a.CopyBatch(s, e, down, device.StreamOrder, most); err != nil {
			t.Fatal(err)
		}
		if err := s.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(near.Bytes(), want) {
			t.Errorf("batches of %d: bytes differ", most)
		}
		if after := a.Calls(); after.Batches == before.Batches || after.BatchOps-before.BatchOps != 2*n {
			t.Errorf("batches of %d: calls were %+v, then %+v", most, before, after)
		}
	}
}
