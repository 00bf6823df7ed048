package device

import "golang.org/x/sys/cpu"

func accumulators() map[string]accumulator {
	all := map[string]accumulator{"plain": nil}
	if cpu.X86.HasAVX2 {
		all["avx2"] = accumulateAVX2
	}
	if cpu.X86.HasAVX512F {
		all["avx512"] = accumulateAVX512
	}
	return all
}
