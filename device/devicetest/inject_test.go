package devicetest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/device/devicetest"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestRules_PrintAndParse(t *testing.T) {
	for _, text := range []string{
		"(fail copy (every 50))",
		"(fail stream (at 3)) (flip host byte (chance 1/100 7))",
		"(half pages (or (at 1) (and (from 10) (not (every 2)))))",
		"(fail alloc (from 2)) (fail record (at 1)) (fail wait (at 1)) (fail signal (at 1)) (fail pages (at 1))",
		"",
	} {
		rules, err := devicetest.ParseRules(text)
		if err != nil {
			t.Fatal(err)
		}
		var words []string
		for _, r := range rules {
			words = append(words, r.String())
		}
		if got := strings.Join(words, " "); got != text {
			t.Errorf("%q is printed as %q", text, got)
		}
	}
	for _, text := range []string{
		"fail copy", "(fail copy", "(fail everything)", "(fail copy (every 0))", "(fail copy (every))", "(fail copy (chance 2/3 1))",
		"(fail copy (not (at 1) (at 2)))", "(fail copy (and))", "(fail copy (sometimes))", "(fail copy (at 1) (at 2))", "()", "(fail copy))",
	} {
		if rules, err := devicetest.ParseRules(text); err == nil {
			t.Errorf("%q is read as %v", text, rules)
		}
	}
}

// Whatever ParseRules takes is printed as text that it takes, for the same rules.
func FuzzRules(f *testing.F) {
	f.Add("(half pages (or (at 1) (and (from 10) (not (every 2)))))")
	f.Add("(fail copy (chance 1/20 3)) (fail stream)")
	f.Fuzz(func(t *testing.T, text string) {
		rules, err := devicetest.ParseRules(text)
		for _, r := range rules {
			again, err := devicetest.ParseRules(r.String())
			if err != nil || len(again) != 1 || again[0].String() != r.String() {
				t.Errorf("%v is read as %v, error %v", r, again, err)
			}
		}
		if err != nil && rules != nil {
			t.Errorf("refused, and read as %v", rules)
		}
	})
}

func TestInjector_StrikesAtTheCallsThatItsRulesName(t *testing.T) {
	for _, test := range []struct{ when, want string }{
		{"", "1 2 3 4 5 6 7 8 9 10 11 12"},
		{"(every 5)", "5 10"},
		{"(at 3)", "3"},
		{"(from 11)", "11 12"},
		{"(or (at 3) (at 5))", "3 5"},
		{"(and (from 4) (every 3))", "6 9 12"},
		{"(not (from 3))", "1 2"},
	} {
		in, err := devicetest.NewInjector("(fail copy " + test.when + ") (fail wait)")
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for n := 1; n <= 12; n++ {
			if err := in.Hit(devicetest.FailCopy); err != nil {
				got = append(got, fmt.Sprint(n))
				if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "(fail copy") {
					t.Errorf("error %v does not name its rule", err)
				}
			}
		}
		if strings.Join(got, " ") != test.want || in.Hits()[0] != len(got) || in.Hits()[1] != 0 {
			t.Errorf("%s strikes at %v (counted %v), want %s", test.when, got, in.Hits(), test.want)
		}
	}
	strikes := func(seed int) (at []int) {
		in, _ := devicetest.NewInjector(fmt.Sprintf("(fail copy (chance 1/10 %d))", seed))
		for n := range 1000 {
			if in.Hit(devicetest.FailCopy) != nil {
				at = append(at, n)
			}
		}
		return at
	}
	one, again, other := fmt.Sprint(strikes(1)), fmt.Sprint(strikes(1)), fmt.Sprint(strikes(2))
	if n := len(strikes(1)); n < 50 || n > 200 || one != again || one == other {
		t.Errorf("chance strikes %d times of 1000; the same again: %v; another seed is another order: %v", n, one == again, one != other)
	}
}

// A device under an injector without rules is the device.
func TestInjector_WithoutRulesPassesTheSuite(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) devicetest.Harness {
		host, err := device.OpenHost(device.HostOptions{})
		if err != nil {
			t.Fatal(err)
		}
		in, err := devicetest.NewInjector("")
		if err != nil {
			t.Fatal(err)
		}
		return devicetest.Harness{
			Device: in.Device(host),
			Hold:   func(s device.Stream) func() { return host.Hold(devicetest.Unwrap(s)) },
			Fail: func(s device.Stream) error {
				broken := errors.New("broken on purpose")
				host.Fail(devicetest.Unwrap(s), broken)
				return broken
			},
		}
	})
}

func TestInjector_BreaksTheCallsOfADevice(t *testing.T) {
	host, err := device.OpenHost(device.HostOptions{})
	if err != nil {
		t.Fatal(err)
	}
	in, err := devicetest.NewInjector("(fail alloc (at 2)) (fail copy (at 2)) (fail record (at 1)) (fail wait (at 1)) (fail signal (at 1)) (fail stream (at 2))")
	if err != nil {
		t.Fatal(err)
	}
	d := in.Device(host)
	m, err := d.Alloc(8)
	if err != nil {
		t.Fatal(err)
	}
	_, allocErr := d.Alloc(8)
	s, _ := d.NewStream("s")
	e, _ := d.NewEvent()
	src := []byte("12345678")
	write := func(n int64) error { return s.Copy([]device.Op{{Dst: m, Src: device.WrapHost(src), Bytes: n}}) }
	ticket := device.NewTicket()
	if err := write(2); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"alloc": allocErr, "copy": write(8), "record": s.Record(e), "wait": s.Wait(e), "signal": s.Signal(ticket),
	} {
		if !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.Sync(context.Background()); err != nil || string(m.Bytes()[:3]) != "12\x00" {
		t.Errorf("refused calls have done something: %q, %v", m.Bytes(), err)
	}
	if done, _ := ticket.Poll(); done {
		t.Error("a refused ticket was taken")
	}
	if err := errors.Join(s.Record(e), s.Wait(e), s.Signal(ticket), write(8)); err != nil {
		t.Errorf("the stream is not well: %v", err)
	}
	if err := s.Sync(context.Background()); !errors.Is(err, fault.Device) || !strings.Contains(err.Error(), "fail stream") {
		t.Errorf("the stream has not failed: %v", err)
	}
	_ = s.Close()
	if err := errors.Join(m.Free(), d.Close()); err != nil {
		t.Error(err)
	}
	if fmt.Sprint(in.Hits()) != "[1 1 1 1 1 1]" {
		t.Errorf("hits %v", in.Hits())
	}
}
