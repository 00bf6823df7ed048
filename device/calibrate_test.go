package device

import (
	"slices"
	"testing"
	"testing/fstest"
)

func TestLastLevelCache_IsTheLargestThatTheKernelNames(t *testing.T) {
	const dir = "sys/devices/system/cpu/cpu0/cache/index"
	for name, test := range map[string]struct {
		sizes []string
		want  int64
	}{
		"kilobytes":     {[]string{"32K\n", "32K\n", "1024K\n", "32768K\n"}, 32 << 20},
		"megabytes":     {[]string{"48K\n", "260M\n", "2M\n"}, 260 << 20},
		"bytes":         {[]string{"65536\n"}, 64 << 10},
		"none":          {nil, defaultCacheBytes},
		"not a number":  {[]string{"big\n", "K", ""}, defaultCacheBytes},
		"beyond belief": {[]string{"9223372036854775807G\n", "-4K", "0K"}, defaultCacheBytes},
	} {
		root := fstest.MapFS{dir + "9/level": {Data: []byte("3\n")}}
		for i, size := range test.sizes {
			root[dir+string(rune('0'+i))+"/size"] = &fstest.MapFile{Data: []byte(size)}
		}
		if got := lastLevelCache(root); got != test.want {
			t.Errorf("%s: %d bytes, want %d", name, got, test.want)
		}
	}
}

func TestBest_TakesTheKernelThatGainsMostInTheMedian(t *testing.T) {
	a, b := &kernel{name: "a"}, &kernel{name: "b"}
	for name, test := range map[string]struct {
		goTimes []float64
		times   [][]float64
		want    Choice
	}{
		"both gain":            {[]float64{8, 8, 8}, [][]float64{{6, 6, 6}, {4, 4, 4}}, Choice{"b", 2}},
		"one lucky round":      {[]float64{8, 8, 8}, [][]float64{{6, 6, 4}, {8, 8, 1}}, Choice{"a", 8.0 / 6}},
		"a bad hour for all":   {[]float64{8, 80, 8}, [][]float64{{4, 40, 4}, {6, 60, 6}}, Choice{"a", 2}},
		"too little":           {[]float64{100, 100, 100}, [][]float64{{96, 96, 96}, {97, 97, 97}}, Choice{"go", 1}},
		"one round":            {[]float64{8}, [][]float64{{4}, {9}}, Choice{"a", 2}},
		"two rounds, one luck": {[]float64{8, 8}, [][]float64{{8, 1}, {8, 8}}, Choice{"go", 1}},
	} {
		k, got := best([]*kernel{a, b}, test.goTimes, test.times)
		if got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		if (k == nil) != (got.Kernel == "go") || k != nil && k.name != got.Kernel {
			t.Errorf("%s: chose %v and says %v", name, k, got)
		}
	}
}

func TestCalibrateOps_CopyEveryByteOnce(t *testing.T) {
	dst, src := &Memory{size: calibrateBytes}, &Memory{size: calibrateBytes}
	ops := calibrateOps(dst, src)
	for what, offset := range map[string]func(Op) int64{
		"destination": func(op Op) int64 { return op.DstOff },
		"source":      func(op Op) int64 { return op.SrcOff },
	} {
		offsets := make([]int64, len(ops))
		for i, op := range ops {
			offsets[i] = offset(op)
		}
		slices.Sort(offsets)
		for i, off := range offsets {
			if off != int64(i)*calibrateRow || len(ops) != calibrateBytes/calibrateRow {
				t.Fatalf("row %d of %d in the %s is at %d", i, len(ops), what, off)
			}
		}
	}
}

func TestHost_KernelsAreMeasuredOnce(t *testing.T) {
	h := openHost(t, HostOptions{})
	got := h.Kernels()
	if again := h.Kernels(); again != got {
		t.Errorf("first %v, then %v", got, again)
	}
	if got.CacheBytes <= 0 {
		t.Errorf("a cache of %d bytes", got.CacheBytes)
	}
	names := KernelNames()
	for _, c := range []Choice{got.Cached, got.Streamed} {
		if !slices.Contains(names, c.Kernel) {
			t.Errorf("chose %q, want one of %q", c.Kernel, names)
		}
		if c.Gain < leastGain && c != (Choice{"go", 1}) {
			t.Errorf("chose %v, which gains too little", c)
		}
	}
}
