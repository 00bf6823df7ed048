package hostpool

import (
	"testing"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
	"github.com/kvferry/kvferry/page"
)

// A byte that went wrong is found before anybody waits for the run, and only that run
// is lost.
func TestScrub_FindsAFlippedByteInASuspendedRun(t *testing.T) {
	r := newShapeRig(t)
	p := r.pool(4)
	keys := map[page.ID]uint64{0: 1, 1: 2, 2: 3}
	r.suspend(p, ann, Offloaded{}, keys, 0, 1)
	r.suspend(p, bob, Offloaded{}, keys, 2)
	scrub := func(pages, wrong int) {
		t.Helper()
		gotPages, gotWrong, err := p.Scrub(t.Context())
		noError(t, err)
		if gotPages != pages || gotWrong != wrong {
			t.Errorf("looked at %d pages, %d runs wrong; want %d and %d", gotPages, gotWrong, pages, wrong)
		}
	}
	scrub(3, 0)
	b := hostBytes(t, p, p.suspended[ann].Pages[1])
	b[len(b)-1] ^= 1
	scrub(3, 1)
	scrub(1, 0) // a run that is known to be wrong is not looked at again
	_, err := r.resume(p, ann, 3, 4)
	faulttest.Refused(t, err, fault.Corrupt, "page 1 of the run", `"ann"`)
	_, err = r.resume(p, bob, 5)
	noError(t, err)
	r.wantDevice(5, 3)
	scrub(0, 0)
	r.wantFree(p, 4)
}
