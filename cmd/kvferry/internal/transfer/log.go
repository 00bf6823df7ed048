package transfer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/engines"
	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
	"github.com/kvferry/kvferry/transfer"
)

// Log writes what happens to what is served: for people, or as one JSON object a line,
// whose keys are stable. What can't be written is said by Err.
type Log struct {
	W    io.Writer
	JSON bool
	err  error
}

// Err returns the first error of W.
func (l *Log) Err() error { return l.err }

// event is what all that happens has.
type event struct {
	Event string    `json:"event"`
	Time  time.Time `json:"time"` // as RFC 3339 has it
}

func happens(what string) event { return event{what, time.Now()} }

// Started is what is served.
type Started struct {
	event                  // "serving"
	Owner        string    `json:"owner"`
	Epoch        string    `json:"epoch"`
	Seed         uint64    `json:"seed"`
	Pages        int       `json:"pages"` // published
	PageBytes    int64     `json:"page_bytes"`
	Cache        string    `json:"cache"`
	Device       string    `json:"device"`
	Engines      []string  `json:"engines"` // in the order in which readers should try them
	Reached      []string  `json:"reached"` // where each is
	LeaseSeconds float64   `json:"lease_seconds"`
	Expires      time.Time `json:"expires"`
	Descriptor   string    `json:"descriptor"` // the file
	Warnings     []string  `json:"warnings"`

	flags    []string // that a reader has to give
	far      []string // engines by which readers on other hosts can read
	farFlags []string // that these have to give
}

// Started says what is served, and what to do now.
func (l *Log) Started(s Started) {
	s.event = happens("serving")
	if l.JSON {
		l.object(s)
		return
	}
	l.printf("kvferry transfer serve · %d %s of %s · %s · seed %d\n", s.Pages, figures.Plural(s.Pages, "page", "pages"), figures.Size(s.PageBytes), figures.Size(s.PageBytes*int64(s.Pages)), s.Seed)
	l.printf("cache       %s, on %s\n", s.Cache, s.Device)
	l.printf("engines     %s\n", strings.Join(s.Reached, "; "))
	lease := time.Duration(s.LeaseSeconds * float64(time.Second))
	l.printf("lease       %v, published anew before it ends\n", lease)
	where := s.Descriptor
	if where == Stdio {
		where = "on standard output"
	}
	l.printf("descriptor  %s\n", where)
	for _, w := range s.Warnings {
		l.printf("warning     %s\n", w)
	}
	l.printf("\nNow, in another terminal on this host:\n  %s\n", s.command(s.Descriptor, s.flags))
	if len(s.far) > 0 {
		file := "FILE"
		if s.Descriptor != Stdio {
			file = filepath.Base(s.Descriptor)
		}
		needs := ""
		switch key, library := slices.Contains(s.far, engines.TCP), slices.Contains(s.far, engines.Mooncake); {
		case key && library:
			needs = ", of the key, and Mooncake's library"
		case key:
			needs = " and of the key"
		case library:
			needs = " and Mooncake's library"
		}
		l.printf("On another host, with a copy of the descriptor (good for %v at most: --lease)%s:\n  %s\n", lease, needs, s.command(file, s.farFlags))
	}
	l.printf("Ctrl-C ends this one.\n\n")
}

// command is what a reader types.
func (s *Started) command(descriptor string, flags []string) string {
	words := []string{"kvferry transfer read"}
	if descriptor != DefaultDescriptor() {
		words = append(words, "--descriptor "+shellWord(descriptor))
	}
	return strings.Join(append(words, flags...), " ")
}

// shellWord quotes what a shell would take apart.
func shellWord(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-:=,+@%", r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// Renewed says that the pages were published anew. To people it is of no interest.
func (l *Log) Renewed(d *transfer.Descriptor) {
	if l.JSON {
		l.object(struct {
			event
			Epoch   string    `json:"epoch"`
			Expires time.Time `json:"expires"`
		}{happens("published"), epochText(d.Epoch), d.Expires})
	}
}

// Reader says what a reader has done.
func (l *Log) Reader(r reader) {
	if l.JSON {
		l.object(struct {
			event
			State  readerState `json:"state"`
			Engine string      `json:"engine"`
			Epoch  string      `json:"epoch"`
		}{happens("reader"), r.state, r.engine, epochText(r.epoch)})
		return
	}
	what := map[readerState]string{
		readerJoined: "a reader has joined", readerDone: "a reader has acknowledged", readerGone: "a reader has gone without a word",
	}[r.state]
	l.printf("%s  %s: %s (publication %s)\n", time.Now().Format(time.TimeOnly), r.engine, what, epochText(r.epoch))
}

// Changed says that an engine can't be read by, or can again.
func (l *Log) Changed(c change) {
	if l.JSON {
		l.object(struct {
			event
			Engine string   `json:"engine"`
			Error  *Failure `json:"error"` // null: it can
		}{happens("engine"), c.engine, failureOf(c.lost)})
		return
	}
	what := "can be read by again: readers need the new descriptor"
	if c.lost != nil {
		what = "can't be read by, and is started again: " + oneLine(c.lost.Error())
	}
	l.printf("%s  %s: %s\n", time.Now().Format(time.TimeOnly), c.engine, what)
}

// Refused says that a reader was refused.
func (l *Log) Refused(r refusal) {
	if l.JSON {
		l.object(struct {
			event
			Engine string   `json:"engine"`
			Peer   string   `json:"peer"`
			Others int64    `json:"others"` // that were refused before it, and not told of
			Error  *Failure `json:"error"`
		}{happens("refused"), r.engine, r.peer, r.others, failureOf(r.err)})
		return
	}
	why := "it ended the connection"
	if !errors.Is(r.err, io.EOF) {
		why = r.err.Error()
	}
	others := ""
	if r.others > 0 {
		others = fmt.Sprintf(" (and %d %s before it)", r.others, figures.Plural(int(r.others), "other", "others"))
	}
	l.printf("%s  %s: a reader at %s was refused: %s%s\n", time.Now().Format(time.TimeOnly), r.engine, r.peer, oneLine(why), others)
}

// oneLine takes out of a text what a terminal might obey.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}

// Ended says how it ended.
func (l *Log) Ended(joined, acknowledged int) {
	if l.JSON {
		l.object(struct {
			event
			Joined       int `json:"joined"`
			Acknowledged int `json:"acknowledged"`
		}{happens("ended"), joined, acknowledged})
		return
	}
	l.printf("ended: readers joined %s, and acknowledged %s\n", times(joined), times(acknowledged))
}

func times(n int) string { return strconv.Itoa(n) + figures.Plural(n, " time", " times") }

func (l *Log) printf(format string, args ...any) {
	if _, err := fmt.Fprintf(l.W, format, args...); l.err == nil {
		l.err = err
	}
}

func (l *Log) object(x any) {
	e := json.NewEncoder(l.W)
	e.SetEscapeHTML(false)
	if err := e.Encode(x); l.err == nil {
		l.err = err
	}
}
