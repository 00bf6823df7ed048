// Package copier is held to what others of its kind got wrong.
//
// # Public faults
//
// Where vLLM's background copies of KV pages, and those of its peers, have failed in
// public (number, and issue of vllm-project/vllm where there is no name), and what holds
// ours to better. Tests without a package are of package copier.
//
//	 1 #45704   a store read what a kernel still wrote
//	            `TestQueue_StoreWaitsForItsEvent`, and without the event
//	            `TestQueue_NegativeControl_WithoutItsEventAJobGoesWrong`
//	 2 #47282   a load overwrote what a kernel still read
//	            `TestQueue_LoadWaitsForItsEvent`, and the same control
//	 3 #31341   the same in another backend: both tests run on every backend
//	 4 #46379   batches refused on the legacy stream
//	            `TestQueue_LegacyStreamTakesLinearCopies`, `TestQueue_CopiesEveryByteOfEveryCache`
//	 5 #39491   one bad copy ended the engine
//	            `TestQueue_BadJobFailsAlone`, `TestQueue_MemoryOutOfReachFailsItsJobAlone`,
//	            `TestQueue_PagesThatAreNotPinnedFailTheirJobAlone`
//	 6 #53860   an index for each copy, or for each attribute: a batch has one order, and
//	            device.Engine.CopyBatch takes no more; the fakes look at every index:
//	            device/cuda `TestCopyBatch_CopiesAndNothingElse`
//	 7 #49276   the driver crashed on huge batches and hung on repeated scatters
//	            `TestQueue_BatchesAreCut`, `TestQueue_RandomJobs`
//	 8 #43018   HIP crashed above 8192, and refused attributes
//	            `TestQueue_BatchesAreCut`, `TestQueue_BatchesOfTheEngine`; device/hip
//	            `TestCopyBatch_CopiesWithEachVersion`
//	 9 sglang#21869   nine arguments, or eight
//	            device/cuda `TestCopyBatch_CopiesAndNothingElse`, on drivers of both forms,
//	            and `TestRuntime_CopiesWithEachDriver`
//	10 (a test of vLLM's)   a symbol found at address 0
//	            device/cuda `TestLookUp_NeedsAllAnswersToAgree`
//	11 lmdeploy batches crash on one kind of device
//	            QueueOptions.Linear, `TestQueue_WithoutBatchesCopiesAreLinear`; and
//	            `TestSelect_BatchesJoinWhenTheyPass`
//	22 #51081   a region of 512 GiB or more was not pinned: host memory is made of pieces
//	            of at most 64 GiB, cut where pages end, pinned one by one
//	            device `TestCutPieces_CoverTheMemoryOnce`, hostpool `TestPin_StretchesEndWherePagesEnd`
//	23 #53042   1.9 times the memory asked for: nothing rounds up, the same tests
//	24 #42632   minutes of pinning at the start, or pinning forbidden: it goes on in the
//	            background, and where it is refused pages are copied slowly, with a warning
//	            hostpool `TestPin_ComesBeforeThePagesCanBeClaimed`, `TestPin_RefusedGoesOnWithoutAndSaysSo`
//	25 #42212   many small copies: adjacent pages are one, `TestQueue_RunsAreMerged`;
//	            QueueOptions.Copier takes what was measured to be best, `TestCalibrate`
//	34 #29013   submitting blocked while the driver's queue was full
//	            `TestQueue_SubmitNeverWaitsForTheDevice`
//	38 (a)      completion before submission: `TestQueue_NothingEndsBeforeItIsEnqueued`,
//	            `TestQueue_HalfAJobIsOverWhenItsStreamHasDrained`
//	   (b)      completion lost, or twice: `TestQueue_RandomJobs`
//	   (c)      a flush missed what was still in the list: `TestQueue_BarrierWaitsForJobsInTheList`
//	   (d)      a dead thread was a silent hang: `TestQueue_FirstFailureEndsTheQueue`
//	   (e)      memory freed under a copy that shutdown left: `TestQueue_ShutdownSaysWhatStaysReserved`
package copier
