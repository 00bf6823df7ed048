package device

// KernelNames returns the kernels of this machine, and "go" for none.
func KernelNames() []string {
	names := []string{"go"}
	for _, k := range allKernels() {
		names = append(names, k.name)
	}
	return names
}

// WithKernel returns options of a host device that copies everything that it can
// with the named kernel, in parts so small that workers meet in every row.
func WithKernel(name string, workers int) HostOptions {
	t := &tune{limits: limits{claimBytes: 3000}}
	for _, k := range allKernels() {
		if k.name == name {
			t.choices.streamed = k
		}
	}
	return HostOptions{Workers: workers, tune: t}
}

func allKernels() []*kernel {
	cached, streamed := kernels()
	return append(cached, streamed...)
}

// Parked reports whether the reaper of a sleeps, and whether a helper blocks in the
// driver for it.
func Parked(a *Accelerator) (parked, blocking bool) {
	return a.reap.parked.Load(), a.reap.on.Load() != nil
}

// Abandon ends what runs for a, which can't be closed.
func Abandon(a *Accelerator) { a.reap.close(true) }
