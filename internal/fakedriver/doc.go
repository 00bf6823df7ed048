// Package fakedriver builds and loads strict fakes of the vendors' libraries: the CUDA
// driver, the CUDA runtime over it, and HIP. They are written in C (folder csrc), built by
// the tests with the system's compiler (CC, or cc), and opened as the real ones are, so
// that what a test runs is the same code down to the last argument.
//
// A fake exists to catch what a polite one hides. A test that ends with a violation in
// the fake's log, or with something that was not given back, has failed.
//
//	f := fakedriver.Load(t, fakedriver.Options{Version: fakedriver.CUDA128, Mode: fakedriver.Lazy})
//	dev, err := cuda.Open("0", cuda.Options{Library: f.Path(), Runtime: f.Runtime()})
//
// # What it does
//
//   - Streams are threads that run late. Three modes: at random, by a seed; at once; only
//     when somebody waits or asks three times. [Fake.Hold] keeps one from running anything.
//   - Events stand for the recording that was the latest when somebody began to wait.
//   - A destination is scribbled over with 0xDB before its copy; rows, and the copies of a
//     batch, come in a random order; a batch that may read its sources in any order reads
//     some of them in the call and the others when it runs.
//   - Device memory can't be touched by the processor: that is a fault, which a test can
//     catch with debug.SetPanicOnFault. It holds 0xCD when it is new, and 0xDF, for who has
//     opened it from another process, when it was freed. Addresses that were freed are not
//     used again.
//   - With Options.Protect, host memory can't be read while a copy will write it, nor be
//     written while one will read it. Only shared mappings can be protected, and only in
//     whole OS pages: what shares a page with a copy is closed too.
//   - Freeing device memory waits for the whole device, as in reality: with a stream held
//     it blocks. The setting free_waits=0 has it wait for the memory's own copies.
//
// # What it refuses
//
// Every refusal is the code of the real library. What no correct program does is a
// violation too:
//
//   - addresses: past the end of an allocation, to the byte; freed; not mapped; across two
//     registrations; Go memory, wherever a pointer goes; memory of another device;
//   - pageable memory in a copy, which is slow: allowed by Options.AllowPageable;
//   - structs: fields that are not used and not 0, types of memory that the address is not
//     of, pitches and extents;
//   - batches: attributes, empty copies, destinations that overlap, copies that depend on
//     each other, the legacy stream, the other form of arguments, more than 8192 copies in
//     HIP;
//   - handles that were destroyed or are none; handles of 64 bytes that were not passed by
//     value;
//   - memory that is freed, unpinned or unmapped under a queued copy;
//   - calls on a thread that has no context, in HIP no device: nothing falls back to
//     device 0; calls from host functions; streams of another device than the thread's.
//
// A missing bind is mostly hidden by what an earlier call has left on the thread. So that
// it is seen for certain, [Fake.Expire] makes the contexts of all threads void: a test of
// a function expires them, and calls it. Where a program can't be stopped, the setting
// expire_us does it to threads that have not called for so long.
//
// # What fails on demand
//
// [Fake.FailCall] makes the nth call of a function return a code. [Fake.FailCopy] makes a
// copy fail when it runs: half of it is not done, and every later call of the device returns
// the code, those that free things too, which are gone all the same. [Fake.Lose] does it at
// once. Settings: memory, register_limit, register_code, attributes.
//
// # Settings
//
// [Fake.Set], Options.Settings and the environment of a process, where delay_us is called
// FAKE_DELAY_US, know these, here with what they are unless set:
//
//	mode=random              when streams run: random, eager, lazy
//	seed=1                   of all that is random
//	delay_us=100             the middle of the delays of random mode
//	patience_ms=20           after so long a lazy stream moves unasked
//	devices=2                how many there are, up to 16
//	visible=0,1              which of them the ordinals stand for, as CUDA_VISIBLE_DEVICES has it
//	memory=8589934592        bytes of a device
//	attributes=              of all devices: 40=1,116=0 sets two, by their numbers in the ABI
//	scribble=1               0xDB over a destination before its copy
//	protect=0                no access to host pages that a copy owns: see Options.Protect
//	pageable=0               1 allows copies of pageable memory: see Options.AllowPageable
//	checks=1                 0 does not look for overlaps in batches and boxes, which takes long
//	free_waits=1             0: freeing waits for the memory's own copies only
//	expire_us=0              a thread's context is void after so long without a call; 0: never
//	register_limit=2^39      bytes of one registration (a number)
//	register_code=0          what every registration returns
//	fail=                    cuMemAlloc_v2:2:700,… makes the 2nd call from now on return 700
//	log=                     a file that gets each violation as a line, such as /dev/stderr
//	state=                   a file with the counts, which outlives the process
//
// # By hand
//
// The libraries also work outside of tests, for a look at what the command does on a GPU:
//
//	go test ./internal/fakedriver -run TestKeep -keep /tmp/fakes
//	export KVFERRY_CUDA_LIBRARY=/tmp/fakes/libfakecuda.so KVFERRY_CUDART_LIBRARY=/tmp/fakes/libfakecudart.so
//	export KVFERRY_HIP_LIBRARY=/tmp/fakes/libfakehip.so FAKE_LOG=/dev/stderr
//	kvferry replay --device cuda:0
//
// # Processes
//
// [Build] makes the files for processes that a test starts, and [Env] the environment with
// the options; what the fakes in them have noted fails the test, even when the process was
// killed. The runtime finds the driver beside itself; elsewhere FAKECUDA_DRIVER names it.
//
// # Traps
//
//   - Compiled libraries lie in the user's cache folder (kvferry-fakedriver) for a day after
//     their last use; make clean removes them.
//   - Each Load is a library of its own, since the loader tells them apart by their files,
//     and stays loaded until the process ends.
//   - Violations are texts for people. Test that there is one, by a part of it: [Fake.Expect].
//   - What is queued when a device fails is dropped, and its waits return, but a copy that
//     runs at that moment ends first.
//   - The fakes know nothing of bandwidth, of the order in which real drivers find two
//     mistakes in one call, or of kernels.
package fakedriver
