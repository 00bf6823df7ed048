package doctor

import (
	"slices"
	"strconv"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/cuda"
	"github.com/kvferry/kvferry/device/hip"
)

// makers are the vendors whose devices are looked at.
func makers(m *Machine, o Options) []maker {
	nvidia := cuda.Options{Library: o.CUDA, Runtime: o.CUDART, Root: m.Root}
	amd := hip.Options{Library: o.HIP, Root: m.Root}
	all := []maker{
		{
			name: "cuda", copiers: []string{"cuda", "libcudart"}, ready: m.hasCUDA(), asked: o.CUDA != "" || o.CUDART != "",
			list: func() (int, error) {
				found, err := cuda.List(nvidia)
				return len(found), err
			},
			open:   func(i int) (*device.Accelerator, error) { return cuda.Open(strconv.Itoa(i), nvidia) },
			remedy: "nvidia-smi tells whether the driver works; docker run --gpus all",
		},
		{
			name: "hip", copiers: []string{"libamdhip64"}, ready: m.hasHIP(), asked: o.HIP != "",
			list: func() (int, error) {
				found, err := hip.List(amd)
				return len(found), err
			},
			open:   func(i int) (*device.Accelerator, error) { return hip.Open(strconv.Itoa(i), amd) },
			remedy: "rocminfo tells whether the driver works; docker run --device=/dev/kfd --device=/dev/dri",
		},
	}
	if o.CUDA != "" {
		all[0].flag = "--cuda-library"
	}
	if o.HIP != "" {
		all[1].flag = "--hip-library"
	}
	forced(all, o.Copier)
	return all
}

// forced settles whose devices must use a copier, which is that of one vendor. Where only
// others are, it is these that have none of that name.
func forced(all []maker, copier string) {
	owner := slices.IndexFunc(all, func(v maker) bool { return slices.Contains(v.copiers, copier) })
	here := func(v maker) bool { return v.ready || v.asked }
	if owner >= 0 && (here(all[owner]) || !slices.ContainsFunc(all, here)) {
		all[owner].asked, all[owner].force = true, copier
		return
	}
	for i := range all {
		all[i].force = copier
	}
}
