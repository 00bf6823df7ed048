package replay

import (
	"container/heap"
	"math/rand/v2"
	"slices"
)

// DefaultRequests is the length of the built-in chat load.
const DefaultRequests = 12_000

// generatedName is the name of every generated trace.
const generatedName = "built-in chat load"

// What the built-in load is made of. The figures give it the shape of a real
// hour of chat (about 12,000 prompt tokens a request, 0.4 of the pages seen
// before), with much that comes back only after the default pools gave it up.
const (
	chatSystems   = 12     // shared system prompts, some of them used by most
	chatDocuments = 40_000 // documents that people ask about, with a long tail
	chatWithDoc   = 60     // of 100 conversations begin with a document
	chatGoesOn    = 28     // of 100 conversations have a second turn
	chatStays     = 55     // of 100 turns after the second have another
	chatStartGap  = 470    // milliseconds between the starts of conversations, mean
	chatMaxTokens = 90_000 // a conversation that has more says nothing more
)

type pieces []struct{ share, end int }

// spread is a distribution of whole numbers: its least value, and then pieces
// that each end at a value and hold so many of 100 draws, evenly. There is no
// floating point in it, so that every machine draws the same.
type spread struct {
	least  int
	pieces pieces
}

func (s spread) draw(r *rand.Rand) int {
	from := s.least
	u := r.IntN(100)
	for _, p := range s.pieces {
		if u < p.share {
			return from + r.IntN(p.end-from)
		}
		u -= p.share
		from = p.end
	}
	return from
}

// spreads are the distributions that conversations are made of.
type spreads struct {
	document spread // tokens
	turn     spread // tokens that a user adds
	answer   spread // tokens
	think    spread // milliseconds between two turns
}

func chatSpreads() spreads {
	return spreads{
		document: spread{600, pieces{{25, 4_000}, {25, 8_000}, {25, 14_000}, {15, 24_000}, {10, 60_000}}},
		turn:     spread{10, pieces{{30, 300}, {30, 1_200}, {25, 4_000}, {12, 10_000}, {3, 30_000}}},
		answer:   spread{1, pieces{{40, 200}, {40, 450}, {15, 900}, {5, 2_000}}},
		think:    spread{4_000, pieces{{20, 25_000}, {25, 90_000}, {25, 240_000}, {20, 700_000}, {10, 2_000_000}}},
	}
}

// Generate makes the first n requests of the built-in multi-turn chat load for
// a seed, or DefaultRequests of them if n is 0: shared system prompts, growing
// conversations and a long tail of documents. The same seed gives the same load
// on every machine, and a longer load begins with every shorter one.
func Generate(seed uint64, n int) *Trace {
	if n <= 0 {
		n = DefaultRequests
	}
	c := newChat(seed)
	t := &Trace{Name: generatedName, Requests: make([]Request, 0, n)}
	for len(t.Requests) < n {
		req := c.next()
		t.Requests = append(t.Requests, req)
		t.Tokens += int64(req.Input)
	}
	return t
}

// chat is a load in progress: conversations that will speak again, by time.
type chat struct {
	rand    *rand.Rand
	spreads spreads
	systems [][]int64
	// docs are the ids of the documents seen so far. An id names a block and
	// all that is before it, so a document behind another system prompt has
	// other ids.
	docs   map[docAt][]int64
	live   talks
	begun  int // conversations begun
	start  int // when the next one begins, ms
	nextID int64
	slab   idSlab
}

type docAt struct{ system, doc int }

func newChat(seed uint64) *chat {
	c := &chat{rand: rand.New(rand.NewPCG(seed, 0x6b76)), spreads: chatSpreads(), docs: map[docAt][]int64{}}
	for range chatSystems {
		c.systems = append(c.systems, c.appendFresh(nil, 1+c.rand.IntN(4)))
	}
	return c
}

// next makes the next request in time.
func (c *chat) next() Request {
	if len(c.live) == 0 || c.start <= c.live[0].at {
		return c.say(c.begin())
	}
	return c.say(heap.Pop(&c.live).(*talk)) //nolint:errcheck // say pushes nothing else
}

// begin starts a conversation. What it shares with others is cut at whole ids.
func (c *chat) begin() *talk {
	t := &talk{at: c.start, serial: c.begun}
	c.begun++
	c.start += c.rand.IntN(2 * chatStartGap)
	system := c.skewed(chatSystems)
	t.ids = append(t.ids, c.systems[system]...)
	if c.rand.IntN(100) < chatWithDoc {
		at := docAt{system, c.skewed(chatDocuments)}
		if c.docs[at] == nil {
			c.docs[at] = c.appendFresh(nil, (c.spreads.document.draw(c.rand)+IDTokens-1)/IDTokens)
		}
		t.ids = append(t.ids, c.docs[at]...)
	}
	t.tokens = len(t.ids) * IDTokens
	return t
}

// say makes the request of one turn, and queues the next turn if there is one.
func (c *chat) say(t *talk) Request {
	t.tokens += c.spreads.turn.draw(c.rand)
	t.ids = c.appendFresh(t.ids, t.tokens/IDTokens-len(t.ids))
	req := Request{Time: int64(t.at), Input: t.tokens, Output: c.spreads.answer.draw(c.rand)}
	ids := t.ids
	if t.tokens%IDTokens != 0 {
		// What the last, partial block is called changes when it grows.
		ids = c.appendFresh(slices.Clip(ids), 1)
	}
	req.IDs = c.slab.copyOf(ids)

	stays := chatStays
	if t.turns++; t.turns == 1 {
		stays = chatGoesOn
	}
	t.tokens += req.Output
	t.at += c.spreads.think.draw(c.rand)
	if c.rand.IntN(100) < stays && t.tokens < chatMaxTokens {
		heap.Push(&c.live, t)
	}
	return req
}

func (c *chat) appendFresh(ids []int64, n int) []int64 {
	for range n {
		ids = append(ids, c.nextID)
		c.nextID++
	}
	return ids
}

// skewed draws one of n so that the first are drawn most, with a long tail.
func (c *chat) skewed(n int) int {
	return c.rand.IntN(1 + c.rand.IntN(n))
}

// talk is one conversation.
type talk struct {
	at     int     // when it speaks next, ms
	serial int     // decides between two that speak at once
	turns  int     // so far
	ids    []int64 // of its whole blocks so far
	tokens int     // so far, answers included
}

// talks is a heap by time.
type talks []*talk

func (q *talks) Len() int { return len(*q) }

func (q *talks) Less(i, j int) bool {
	a, b := (*q)[i], (*q)[j]
	if a.at != b.at {
		return a.at < b.at
	}
	return a.serial < b.serial
}

func (q *talks) Swap(i, j int) { (*q)[i], (*q)[j] = (*q)[j], (*q)[i] }

func (q *talks) Push(x any) {
	*q = append(*q, x.(*talk)) //nolint:errcheck // say pushes nothing else
}

func (q *talks) Pop() any {
	old := *q
	t := old[len(old)-1]
	*q = old[:len(old)-1]
	return t
}
