package fault

import "fmt"

// Reason says why a page that was asked for was not found. Every page asked for
// is either a hit or has exactly one reason.
type Reason uint8

// The reasons for a miss.
const (
	Hit          Reason = iota // not a miss
	NeverStored                // no page was ever stored under this key
	Evicted                    // it was stored, and gave way to others
	BeyondPrefix               // it is there, but an earlier page of the prefix is missing
	HeldBack                   // it is there, but one token of the prompt must be computed
	Partial                    // the last page of a prompt, not full: never shared
	Pending                    // somebody is writing it at this moment
	Corrupted                  // its bytes failed their check and were discarded
	CopyFailed                 // a copy of it failed, to the host or back, and it was given up
	HistoryFull                // no record, and the record of evictions has overflowed: it may have been evicted
	NumReasons   = iota        // how many there are, Hit included
)

var reasonNames = [NumReasons]string{
	"hit", "never stored", "evicted", "beyond prefix", "held back", "partial", "pending", "corrupted", "copy failed", "history full",
}

func (r Reason) String() string {
	if int(r) >= len(reasonNames) {
		return fmt.Sprintf("reason %d", uint8(r))
	}
	return reasonNames[r]
}
