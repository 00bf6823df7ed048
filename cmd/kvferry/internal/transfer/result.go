package transfer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/figures"
	"github.com/kvferry/kvferry/fault"
)

// Result is what a read found out. Its JSON keys are stable; rates are in GB/s (10^9).
type Result struct {
	Version     string   `json:"version"`
	Descriptor  string   `json:"descriptor"`
	Owner       string   `json:"owner"`
	Entity      string   `json:"entity"`
	Engine      string   `json:"engine"`
	Device      string   `json:"device"` // that was read into
	Cache       string   `json:"cache"`
	Pages       int      `json:"pages"`  // that tokens of were read, in one pass
	Tokens      [2]int   `json:"tokens"` // from, and behind the last
	PageBytes   int64    `json:"page_bytes"`
	Passes      int      `json:"passes"`       // that went well, or whose bytes were wrong
	BytesMoved  int64    `json:"bytes_moved"`  // by all passes
	FirstGBs    *float64 `json:"first_gb_s"`   // the first pass opens the owner, and its memory is new
	MedianGBs   *float64 `json:"median_gb_s"`  // of the passes after it; of the first, if it is alone
	LeastGBs    *float64 `json:"least_gb_s"`   //
	MostGBs     *float64 `json:"most_gb_s"`    //
	Verify      string   `json:"verify"`       //
	Seed        *uint64  `json:"seed"`         // of the contents that were expected
	SeedGiven   bool     `json:"seed_given"`   // by --seed, and not by the descriptor
	Compared    int64    `json:"compared"`     // bytes that were read, and compared with the seed's
	Untouched   int64    `json:"untouched"`    // bytes of other tokens, compared with what was there before
	SumsChecked uint64   `json:"sums_checked"` // pages compared with their owner's checksums
	Unsummed    uint64   `json:"unsummed"`     // pages and parts that carry no checksum, or can't be compared
	// Acknowledged says that the owner was told. It may not have heard it.
	Acknowledged   bool     `json:"acknowledged"`
	Unacknowledged string   `json:"unacknowledged,omitempty"`
	Error          *Failure `json:"error"`
}

// Failure is the error that ended a read.
type Failure struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// result tells of what was done so far, which may be nothing.
func (r *readRun) result() *Result {
	x := &Result{Descriptor: r.o.Descriptor, Verify: r.o.Verify, Seed: r.o.Seed, SeedGiven: r.o.Seed != nil}
	if r.o.Verify == VerifyOff {
		x.Seed, x.SeedGiven = nil, false
	}
	if r.d != nil {
		x.Owner, x.Entity, x.Cache, x.PageBytes = r.d.Owner.String(), r.d.Entity, describe(r.d.Geometry), r.d.Geometry.PageBytes()
		x.Engine = r.engine()
	}
	if r.opened != nil {
		x.Device = r.opened.Device.Name()
	}
	if r.reader == nil {
		return x
	}
	g, stats := r.pages.cache.Geometry(), r.reader.Stats()
	x.Pages, x.Tokens = (r.end-1)/g.PageSize()-r.start/g.PageSize()+1, [2]int{r.start, r.end}
	x.Passes, x.BytesMoved = len(r.seconds), r.bytes()*int64(len(r.seconds))
	x.Compared, x.Untouched, x.SumsChecked, x.Unsummed = r.compared, r.untouched, stats.Checked, stats.Pages-stats.Checked
	x.Acknowledged, x.Unacknowledged = r.acknowledged, r.unacknowledged
	if r.o.Verify != VerifyOff {
		x.Seed, x.SeedGiven = &r.pages.seed, r.o.Seed != nil
	}
	if len(r.seconds) > 0 {
		rates := make([]float64, 0, len(r.seconds))
		for _, s := range r.seconds {
			rates = append(rates, float64(r.bytes())/s/1e9)
		}
		x.FirstGBs = &rates[0]
		steady := slices.Sorted(slices.Values(rates[min(1, len(rates)-1):]))
		n := len(steady)
		median := (steady[(n-1)/2] + steady[n/2]) / 2
		x.LeastGBs, x.MedianGBs, x.MostGBs = &steady[0], &median, &steady[n-1]
	}
	return x
}

// failureOf is what is said of an error; nil of none.
func failureOf(err error) *Failure {
	if err == nil {
		return nil
	}
	x := &Failure{Kind: "other", Message: err.Error(), Hint: fault.RemedyOf(err)}
	if kind := fault.KindOf(err); kind != 0 {
		x.Kind = kind.Error()
	}
	return x
}

// WriteJSON writes the result as one indented JSON object.
func (x *Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(x)
}

// WriteText writes the result for people.
func (x *Result) WriteText(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "kvferry transfer read · %s · %s %s of %s, tokens %d to %d · %s\n", x.Engine, count(int64(x.Pages)), figures.Plural(x.Pages, "page", "pages"),
		figures.Size(x.PageBytes), x.Tokens[0], x.Tokens[1], x.Device)
	fmt.Fprintf(&b, "owner     %s (%s)\n", x.Owner, x.Entity)
	fmt.Fprintf(&b, "cache     %s\n", x.Cache)
	if x.FirstGBs != nil {
		fmt.Fprintf(&b, "rate      %s GB/s", rate(*x.MedianGBs))
		if x.Passes > 2 {
			fmt.Fprintf(&b, " (%s–%s)", rate(*x.LeastGBs), rate(*x.MostGBs))
		}
		if x.Passes == 1 {
			b.WriteString(", the connection and new memory included; --repeat 10 shows what is left without them")
		} else {
			fmt.Fprintf(&b, ", the first pass %s GB/s: it connects, and its memory is new", rate(*x.FirstGBs))
		}
		fmt.Fprintf(&b, "\nmoved     %s bytes in %s\n", count(x.BytesMoved), strconv.Itoa(x.Passes)+figures.Plural(x.Passes, " pass", " passes"))
	}
	x.writeChecks(&b)
	switch {
	case x.Acknowledged:
		b.WriteString("owner     was told that it can have its pages back\n")
	case x.Unacknowledged != "":
		fmt.Fprintf(&b, "owner     was not told: %s\n", x.Unacknowledged)
	}
	b.WriteString("For machines: --json\n")
	_, err := w.Write(b.Bytes())
	return err
}

// writeChecks says what was checked, and no more.
func (x *Result) writeChecks(b *bytes.Buffer) {
	b.WriteString("checked   its epoch before and behind each read\n")
	if x.Seed == nil {
		b.WriteString("          contents not compared (--verify off)\n")
	} else {
		from := "as its descriptor says"
		if x.SeedGiven {
			from = "as given"
		}
		fmt.Fprintf(b, "          %s bytes compared with the contents of seed %d, %s: no wrong one\n", count(x.Compared), *x.Seed, from)
		if x.Untouched > 0 {
			fmt.Fprintf(b, "          %s bytes of other tokens compared: none was touched\n", count(x.Untouched))
		}
	}
	fmt.Fprintf(b, "          %s %s compared with the owner's checksums", count(int64(x.SumsChecked)), figures.Plural(int(x.SumsChecked), "page", "pages"))
	if x.Unsummed > 0 {
		fmt.Fprintf(b, "; %s had none to compare: parts of pages, or pages of a device", count(int64(x.Unsummed)))
	}
	b.WriteString("\n")
}

// rate writes GB/s with three digits.
func rate(x float64) string { return figures.Three(x) }

// count writes a number with thousands separators.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
