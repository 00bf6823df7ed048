package fakedriver

import (
	"fmt"
	"strings"
)

// Counts are what is live in a driver, and what it has done. The order of the fields is
// that of the enum in fake.h.
type Counts struct {
	// Live things. All are 0 when everything was given back.
	DeviceMemories, PinnedMemories, Registrations int64
	OpenedMemories                                int64 // of other processes
	Handles, Reservations, Mappings               int64 // of memory that is mapped piece by piece
	Streams, Events, Contexts                     int64

	DeviceBytes, RegisteredBytes int64

	// Copies since the start: calls of each kind, and copies inside of batches.
	Linear, Rects, Boxes, Batches, BatchCopies int64
	CopiedBytes                                int64 // by copies that have run
	Pageable                                   int64 // copies of pageable memory

	Violations    int64
	PendingErrors int64 // of threads, in the runtime library, that nobody has asked for
}

const countFields = 21

var liveNames = [...]string{
	"device memories", "pinned memories", "registrations", "opened memories",
	"handles", "reservations", "mappings", "streams", "events", "contexts",
}

func countsOf(words []uint64) (c Counts) {
	for i, field := range c.fields() {
		*field = int64(words[i])
	}
	return c
}

func (c *Counts) fields() [countFields]*int64 {
	return [...]*int64{
		&c.DeviceMemories, &c.PinnedMemories, &c.Registrations, &c.OpenedMemories,
		&c.Handles, &c.Reservations, &c.Mappings, &c.Streams, &c.Events, &c.Contexts,
		&c.DeviceBytes, &c.RegisteredBytes,
		&c.Linear, &c.Rects, &c.Boxes, &c.Batches, &c.BatchCopies, &c.CopiedBytes, &c.Pageable,
		&c.Violations, &c.PendingErrors,
	}
}

// Leaks says what is live, "" when nothing is.
func (c *Counts) Leaks() string {
	var live []string
	fields := c.fields()
	for i, name := range liveNames {
		if n := *fields[i]; n != 0 {
			live = append(live, fmt.Sprintf("%d %s", n, name))
		}
	}
	if c.PendingErrors != 0 {
		live = append(live, fmt.Sprintf("%d errors that nobody has asked for", c.PendingErrors))
	}
	return strings.Join(live, ", ")
}
