// Package transfertest is the suite that every engine of package transfer must pass,
// whatever is between its two sides. An engine's test is one call of [Run], and one of
// [Child] in its TestMain when its sides are processes.
//
// The suite sees the owner through [Owner], whose calls can be answered by another
// process, and the reader through the side that it is given. Processes are also killed
// and stopped. Expected bytes come from
// [transfer.AppendReads] and kv.Geometry.Chunks, chunk by chunk, and the whole cache is
// compared: tokens outside the range, padding and other pages included. After each case
// no page is held on either side that was not held before.
//
// [Controls] breaks rules of the seam on purpose, and wants the suite to see it.
package transfertest

import (
	"testing"

	"github.com/kvferry/kvferry/copier"
	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/transfer"
)

// Side is what one side of an engine stands on.
type Side struct {
	Engine transfer.Engine
	// Device has the side's cache, and the streams that copy. Nil means host memory.
	Device device.Device
	// Copier copies on Device. Nil means the portable one.
	Copier copier.Copier
	// Memory makes the regions of the side's cache. Nil means that Device does.
	Memory func(bytes int64) (*device.Memory, error)
	// Close ends what Engine and Device leave, after Engine was closed. Nil is nothing.
	Close func() error
}

// Harness makes the two sides of one engine. Both are made anew for each rig of each
// case, which closes them.
type Harness struct {
	// Role has each owner in a process of its own, where [Child] makes that side.
	Role string
	// Owner makes the side of owners in this process; used when there is no Role.
	Owner func() (Side, error)
	// Reader makes the side that reads.
	Reader func() (Side, error)
	// Unseen says that the engine doesn't see its readers go: what a dead one holds is
	// released when its lease expires.
	Unseen bool
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	all := cases()
	if h.Role != "" {
		all = append(all, processCases()...)
	}
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			if err := c.run(&bench{TB: t, Harness: h}); err != nil {
				t.Error(err)
			}
		})
	}
}

// bench is where a case gets its rigs.
type bench struct {
	testing.TB
	Harness
	sabotage sabotage
}

func (b *bench) rig(local, far func() (*kv.Geometry, error)) *rig {
	b.Helper()
	return newRig(b.TB, b.Harness, local, far, b.sabotage)
}

// plain is the rig of cases that are about something else than geometry.
func (b *bench) plain() *rig {
	b.Helper()
	return b.rig(nhd.LayerMajor, pages(nhd, 19).PageMajor)
}

type testCase struct {
	name string
	run  func(b *bench) error
}

func cases() []testCase {
	return []testCase{
		{"ranges", ranges},
		{"parts of pages that move whole", wholeOnly},
		{"ten thousand pages", tenThousand},
		{"readers at the same time", concurrent},
		{"many publications, one after the other", oneAfterTheOther},
		{"checksums", checksums},
		{"what must be refused", refusals},
		{"descriptors of another geometry", otherGeometry},
		{"descriptors that lie", lies},
		{"broken descriptors", brokenDescriptors},
		{"given up before", givenUpBefore},
		{"given up in the middle", givenUpInTheMiddle},
		{"deadline", deadline},
		{"closed in the middle", closedInTheMiddle},
		{"leased pages are kept", leasedPagesAreKept},
		{"the epoch moves before", epochMovesBefore},
		{"the epoch moves in the middle", epochMovesInTheMiddle},
		{"the epoch moves at the end", epochMovesAtTheEnd},
		{"a lease expires and its page is reused", leaseExpires},
		{"the owner stops", ownerStops},
	}
}
