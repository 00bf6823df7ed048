package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/fault"
)

func sample() *Report {
	wrong := red("cuda", "name another", "not a library")
	wrong.kind = fault.NotFound
	r := &Report{Version: "v1", OS: "linux", Arch: "amd64", Seconds: 1.25, Sections: []Section{
		{Title: "memory", Findings: []Finding{green("pool", "1 GiB"), yellow("huge pages", "echo advise", "none")}},
		{
			Title: "cuda:0", Findings: []Finding{wrong, red("copies", "ask", "first\nsecond")}, Whole: "shares of all",
			Rates: []Rate{{"there", 4096, 1.234, 0.5}, {"there", 64 << 20, 2.468, 1}, {"back", 4096, 12.34, 0.1}, {"back", 64 << 20, 123.4, 1}},
		},
	}}
	r.Level = worst(r.Sections)
	return r
}

const sampleText = `kvferry doctor · v1 · linux/amd64

memory
  green   pool        1 GiB
  yellow  huge pages  none
                      → echo advise

cuda:0
  red     cuda        not a library
                      → name another
  red     copies      first; second
                      → ask

  GB/s, copies of        4 KiB      64 MiB
  there              1.23  50%   2.47 100%
  back               12.3  10%    123 100%
  (shares of all)

1 green, 1 yellow, 2 red. Took 1.2 s. For machines: --json
`

func TestWriteText(t *testing.T) {
	var plain, coloured bytes.Buffer
	if err := errors.Join(sample().WriteText(&plain, false), sample().WriteText(&coloured, true)); err != nil {
		t.Fatal(err)
	}
	if plain.String() != sampleText {
		t.Errorf("got\n%s", plain.String())
	}
	for _, want := range []string{"\x1b[32mgreen \x1b[0m", "\x1b[33myellow\x1b[0m", "\x1b[31mred   \x1b[0m"} {
		if !strings.Contains(coloured.String(), want) {
			t.Errorf("no %q in\n%s", want, coloured.String())
		}
	}
	bare := coloured.String()
	for _, code := range []string{"\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"} {
		bare = strings.ReplaceAll(bare, code, "")
	}
	if bare != plain.String() {
		t.Error("colours change the text")
	}
}

func TestWriteJSON_SaysWhatTheTextSays(t *testing.T) {
	var b bytes.Buffer
	if err := sample().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Level    string
		Sections []struct {
			Title    string
			Findings []struct{ Name, Level, Text, Remedy string }
			Rates    []struct {
				Way   string
				Bytes int64
				GBs   float64 `json:"gb_per_s"`
			}
		}
	}
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Level != "red" || got.Sections[0].Findings[1].Level != "yellow" || got.Sections[0].Findings[1].Remedy != "echo advise" ||
		got.Sections[1].Rates[3].GBs != 123.4 {
		t.Errorf("got %+v", got)
	}
	if strings.Contains(b.String(), "kind") {
		t.Error("the kind is ours")
	}
}

func TestErr_IsThatOfTheFirstRedFinding(t *testing.T) {
	r := sample()
	err := r.Err()
	if !errors.Is(err, fault.NotFound) || err.Error() != "cuda: not a library (and 1 more)" || fault.RemedyOf(err) != "name another" {
		t.Errorf("got %v, %v", err, fault.RemedyOf(err))
	}
	r.Sections[1].Findings = r.Sections[1].Findings[1:]
	if err := r.Err(); !errors.Is(err, fault.Device) {
		t.Errorf("got %v", err)
	}
	r.Sections = r.Sections[:1]
	if err := r.Err(); err != nil {
		t.Errorf("yellow fails: %v", err)
	}
	if l := worst(r.Sections); l != Yellow {
		t.Errorf("the worst is %v", l)
	}
}

func TestRun_LooksAtThisMachine(t *testing.T) {
	r, err := Run(t.Context(), Options{Budget: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	var titles []string
	for _, s := range r.Sections {
		titles = append(titles, s.Title)
		if s.Title == "host" && len(s.Rates) != 2*(len(copySizes())+1) {
			t.Errorf("%d rates of the host, findings %+v", len(s.Rates), s.Findings)
		}
	}
	if got := strings.Join(titles, " "); !strings.HasPrefix(got, "memory processes engines cards transfer engines host") {
		t.Errorf("sections: %s", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := Run(ctx, Options{}); !errors.Is(err, context.Canceled) || r != nil {
		t.Errorf("got %v, %v", r, err)
	}
}

func TestAnswer_DoesNotWaitForADriverThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		end := make(chan struct{})
		got := answer(t.Context(), maker{name: "cuda"}, answerLimit, func(context.Context) []Section {
			<-end
			return nil
		})
		if len(got) != 1 || got[0].Findings[0].Level != Red || !strings.Contains(got[0].Findings[0].Text, "hangs") {
			t.Errorf("got %+v", got)
		}
		if waited := time.Since(began); waited > 25*time.Second {
			t.Errorf("waited %v", waited)
		}
		close(end)
		// One that gives up when it is told to is heard.
		got = answer(t.Context(), maker{}, answerLimit, func(ctx context.Context) []Section {
			<-ctx.Done()
			return []Section{{Title: "late"}}
		})
		if len(got) != 1 || got[0].Title != "late" {
			t.Errorf("got %+v", got)
		}
	})
}

func TestShare_KeepsTheBudget(t *testing.T) {
	for _, n := range []int{1, 2, 8, 16} {
		each := share(12*time.Second, n)
		if all := each * time.Duration(n*3*(len(copySizes())+1)); all > 6*time.Second || each <= 0 {
			t.Errorf("%d devices take %v", n, all)
		}
	}
}

func TestLink_ComparesWithTheSlot(t *testing.T) {
	rates := []Rate{{"host to device", wholeBytes, 50, 1}, {"device to host", wholeBytes, 40, 1}, {"both", wholeBytes, 90, 1}, {"host to device", 4096, 30, 0.6}}
	for slot, want := range map[float64]Level{0: Green, 63: Green, 101: Yellow} {
		if f := link(rates, slot); f.Level != want || !strings.Contains(f.Text, "50.0 GB/s") {
			t.Errorf("slot of %v: %+v", slot, f)
		}
	}
}
