package replay

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/internal/needtest"
)

const goodLine = `{"timestamp": 5, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}`

func TestDecode_ReadsRequestsInOrder(t *testing.T) {
	file := goodLine + "\n" +
		` { "hash_ids" :[ 9223372036854775807 ] ,"output_length":0,"input_length":512,"timestamp":5 } ` + "\r\n" +
		`{"timestamp":9007199254740992,"input_length":1,"output_length":16777216,"hash_ids":[0]}`
	got, err := Decode("chat.jsonl", strings.NewReader(file), 0)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(file))
	want := &Trace{Name: "chat.jsonl", SHA256: hex.EncodeToString(sum[:]), Tokens: 600 + 512 + 1, Requests: []Request{
		{Time: 5, Input: 600, Output: 20, IDs: []int64{1, 2}},
		{Time: 5, Input: 512, Output: 0, IDs: []int64{math.MaxInt64}},
		{Time: 1 << 53, Input: 1, Output: MaxTokens, IDs: []int64{0}},
	}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestDecode_LimitStopsEarlyButTheDigestIsOfTheWholeFile(t *testing.T) {
	file := goodLine + "\n" + goodLine + "\nnot a request\n"
	got, err := Decode("chat.jsonl", strings.NewReader(file), 2)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Requests) != 2 {
		t.Errorf("%d requests, want 2", len(got.Requests))
	}
	sum := sha256.Sum256([]byte(file))
	if want := hex.EncodeToString(sum[:]); got.SHA256 != want {
		t.Errorf("digest %s, want %s", got.SHA256, want)
	}
	if got, err = Decode("chat.jsonl", strings.NewReader(goodLine), 5); err != nil || len(got.Requests) != 1 {
		t.Errorf("a limit over the length gives %v, %v", got, err)
	}
}

func TestDecode_WarnsOnceWhenTimeGoesBack(t *testing.T) {
	at := func(ms int) string { return strings.Replace(goodLine, "5", fmt.Sprint(ms), 1) + "\n" }
	for _, tc := range []struct {
		times []int
		want  []string
	}{
		{[]int{1, 1, 2}, nil},
		{[]int{4, 9, 7}, []string{"chat.jsonl:3: timestamp goes back from 9 to 7; requests are replayed in file order"}},
		{[]int{4, 3, 2, 1}, []string{"chat.jsonl:2: timestamp goes back from 4 to 3 (and on 2 more lines); requests are replayed in file order"}},
	} {
		var file strings.Builder
		for _, ms := range tc.times {
			file.WriteString(at(ms))
		}
		got, err := Decode("chat.jsonl", strings.NewReader(file.String()), 0)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(tc.want, got.Warnings); d != "" {
			t.Errorf("%v: %s", tc.times, d)
		}
	}
}

func TestDecode_RefusesWhatIsNotARequestAndSaysWhere(t *testing.T) {
	with := func(field, value string) string {
		m := map[string]string{"timestamp": "0", "input_length": "600", "output_length": "20", "hash_ids": "[1, 2]"}
		m[field] = value
		return fmt.Sprintf(`{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}`,
			m["timestamp"], m["input_length"], m["output_length"], m["hash_ids"])
	}
	manyIDs := "[" + strings.Repeat("1,", MaxTokens/IDTokens) + "1]"
	for _, tc := range []struct{ name, line, want string }{
		{"blank", "", "blank line"},
		{"spaces", "  \t", "blank line"},
		{"text", "hello", `not a JSON object: it begins with "hello"`},
		{"list", "[1]", `not a JSON object: it begins with "[1"`},
		{"binary", "\x00\xff\x01", `not a JSON object: it begins with "\x00\xff\x01"`},
		{"empty object", "{}", "timestamp: the field is missing"},
		{"no time", `{"input_length": 600, "output_length": 20, "hash_ids": [1, 2]}`, "timestamp: the field is missing"},
		{"no ids", `{"timestamp": 0, "input_length": 600, "output_length": 20}`, "hash_ids: the field is missing"},
		{"unknown", `{"timestamp": 0, "chat_id": 3}`, `unknown field "chat_id"`},
		{"case matters", `{"Timestamp": 0}`, `unknown field "Timestamp"`},
		{"long name", `{"` + strings.Repeat("x", 99) + `": 0}`, `unknown field "` + strings.Repeat("x", 32) + `"…`},
		{"twice", `{"timestamp": 0, "timestamp": 0}`, "timestamp: the field is there twice"},
		{"trailing comma", `{"timestamp": 0,}`, "a comma before the end of the object"},
		{"no colon", `{"timestamp" 0}`, `timestamp: "0" where a colon after the name should be`},
		{"no comma", `{"timestamp": 0 "input_length": 1}`, `timestamp: "\"input_length\"" where a comma or the end of the object should be`},
		{"name not quoted", `{timestamp: 0}`, `"timestamp" where the name of a field should be`},
		{"two objects", goodLine + goodLine, `something follows the object: "{\"timestamp\""`},
		{"negative time", with("timestamp", "-1"), "timestamp: -1 is too small, the least is 0"},
		{"negative huge", with("timestamp", "-99999999999999999999"), "timestamp: -99999999999999999999 is too small, the least is 0"},
		{"huge time", with("timestamp", "9007199254740993"), "timestamp: 9007199254740993 is too large, the limit is 9007199254740992"},
		{"fraction", with("timestamp", "1.5"), `timestamp: "1.5" is not a whole number`},
		{"exponent", with("timestamp", "1e3"), `timestamp: "1e3" is not a whole number`},
		{"leading zero", with("timestamp", "007"), `timestamp: "007" begins with a zero`},
		{"plus", with("timestamp", "+7"), `timestamp: "+7" where a whole number should be`},
		{"minus alone", with("timestamp", "-"), `timestamp: "-" where a whole number should be`},
		{"null", with("input_length", "null"), `input_length: "null" where a whole number should be`},
		{"string", with("input_length", `"600"`), `input_length: "\"600\"" where a whole number should be`},
		{"no tokens", with("input_length", "0"), "input_length: 0 is too small, the least is 1"},
		{"huge input", with("input_length", "16777217"), "input_length: 16777217 is too large, the limit is 16777216"},
		{"over 64 bits", with("input_length", strings.Repeat("9", 99)), "input_length: " + strings.Repeat("9", 32) + "… is too large, the limit is 16777216"},
		{"negative output", with("output_length", "-3"), "output_length: -3 is too small, the least is 0"},
		{"ids not a list", with("hash_ids", "7"), `hash_ids: "7" where a list of ids should be`},
		{"no id", with("hash_ids", "[]"), "hash_ids: 0 ids for 600 prompt tokens, want 2"},
		{"one id too few", with("hash_ids", "[1]"), "hash_ids: 1 ids for 600 prompt tokens, want 2"},
		{"one id too many", with("hash_ids", "[1, 2, 3]"), "hash_ids: 3 ids for 600 prompt tokens, want 2"},
		{"far too many ids", with("hash_ids", manyIDs), "hash_ids: more than 32768 ids"},
		{"negative id", with("hash_ids", "[1, -2]"), "hash_ids: -2 is too small, the least is 0"},
		{"huge id", with("hash_ids", "[1, 9223372036854775808]"), "hash_ids: 9223372036854775808 is too large, the limit is 9223372036854775807"},
		{"comma at the end of ids", with("hash_ids", "[1, 2,]"), `hash_ids: "]" where a whole number should be`},
		{"nested ids", with("hash_ids", "[[1, 2]]"), `hash_ids: "[1" where a whole number should be`},
		{"cut in a name", `{"time`, "the line ends inside a name"},
		{"cut after a name", `{"timestamp"`, "timestamp: the line ends where a colon after the name should be"},
		{"cut in ids", `{"timestamp": 0, "hash_ids": [1, 2`, "hash_ids: the line ends where a comma or the end of the list should be"},
		{"cut before the end", `{"timestamp": 0`, "timestamp: the line ends where a comma or the end of the object should be"},
		{"too long", `{"timestamp": ` + strings.Repeat(" ", MaxLine) + `0}`, "line is longer than 1048576 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, end := range []string{"\n", "\n" + goodLine + "\n"} {
				got, err := Decode("chat.jsonl", strings.NewReader(goodLine+"\n"+tc.line+end), 0)
				if got != nil || !errors.Is(err, fault.Invalid) {
					t.Fatalf("got %v, %v; want an error of kind invalid", got, err)
				}
				if want := "chat.jsonl:2: " + tc.want; err.Error() != want {
					t.Errorf("error is %q\nwant        %q", err, want)
				}
				if fault.RemedyOf(err) == "" {
					t.Error("the error has no remedy")
				}
			}
		})
	}
}

func TestDecode_EveryCutOfALineIsAnError(t *testing.T) {
	for i := 1; i < len(goodLine); i++ {
		if got, err := Decode("chat.jsonl", strings.NewReader(goodLine[:i]), 0); !errors.Is(err, fault.Invalid) {
			t.Errorf("%q gives %v, %v", goodLine[:i], got, err)
		}
	}
}

func TestDecode_RefusesAnEmptyTrace(t *testing.T) {
	_, err := Decode("chat.jsonl", strings.NewReader(""), 0)
	if !errors.Is(err, fault.Invalid) || err.Error() != "chat.jsonl: the trace has no requests" {
		t.Errorf("got %v", err)
	}
}

func TestDecode_AReadErrorIsNotTheEndOfTheTrace(t *testing.T) {
	broken := errors.New("the disk is gone")
	for _, limit := range []int{0, 1} { // while decoding, and while reading the rest for the digest
		r := io.MultiReader(strings.NewReader(goodLine+"\n"), iotest.ErrReader(broken))
		if _, err := Decode("chat.jsonl", r, limit); !errors.Is(err, broken) || !errors.Is(err, fault.Invalid) {
			t.Errorf("limit %d: got %v", limit, err)
		}
	}
}

func TestOpen_SaysWhyAFileCannotBeRead(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "none.jsonl"), 0); !errors.Is(err, fault.NotFound) || fault.RemedyOf(err) == "" {
		t.Errorf("no file: %v", err)
	}
	if _, err := Open(t.TempDir(), 0); !errors.Is(err, fault.Invalid) {
		t.Errorf("a directory: %v", err)
	}
}

func TestWhere_NamesTheLine(t *testing.T) {
	file := &Trace{Name: "chat.jsonl"}
	if got := file.Where(3); got != "chat.jsonl:4" {
		t.Error(got)
	}
	if got := Generate(1, 1).Where(0); got != "request 1 of the built-in chat load" {
		t.Error(got)
	}
}

// realTrace opens the public trace that the product is measured with.
func realTrace(tb testing.TB) *Trace {
	tb.Helper()
	const name = "conversation_trace.jsonl"
	path := os.Getenv("KVFERRY_TEST_TRACES")
	if path == "" {
		path = "../../../../../shared/traces" // beside the repository
	}
	if _, err := os.Stat(filepath.Join(path, name)); err != nil {
		needtest.Missing(tb, fmt.Sprintf("no %s: get it from kvcache-ai/Mooncake on GitHub, folder FAST25-release/traces, and set KVFERRY_TEST_TRACES to its folder", name))
	}
	t, err := Open(filepath.Join(path, name), 0)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func TestDecode_ReadsTheRealTrace(t *testing.T) {
	got := realTrace(t)
	const digest = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
	if got.SHA256 != digest || len(got.Requests) != 12_031 || got.Warnings != nil {
		t.Errorf("%d requests, digest %s, warnings %q", len(got.Requests), got.SHA256, got.Warnings)
	}
	if i, n := got.Largest(IDTokens); n != 247 || got.Requests[i].Input != 126_195 {
		t.Errorf("the largest request is %s with %d pages", got.Where(i), n)
	}
}

func BenchmarkDecode(b *testing.B) {
	var file bytes.Buffer
	for _, r := range Generate(1, 2000).Requests {
		writeLine(&file, r)
	}
	b.SetBytes(int64(file.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Decode("chat.jsonl", bytes.NewReader(file.Bytes()), 0); err != nil {
			b.Fatal(err)
		}
	}
}

// traceLine is a request as a general JSON writer and reader sees it.
type traceLine struct {
	Timestamp *int64   `json:"timestamp"`
	Input     *int     `json:"input_length"`
	Output    *int     `json:"output_length"`
	IDs       *[]int64 `json:"hash_ids"`
}

func writeLine(w io.Writer, r Request) {
	if err := json.NewEncoder(w).Encode(traceLine{&r.Time, &r.Input, &r.Output, &r.IDs}); err != nil {
		panic(err) // a bytes.Buffer does not fail
	}
}

// FuzzTrace: any bytes give an error that names a line, or requests that keep
// the rules, survive being written and read again, and are what encoding/json
// reads.
func FuzzTrace(f *testing.F) {
	f.Add([]byte(goodLine))
	f.Add([]byte(goodLine + "\n" + goodLine + "\n"))
	f.Add([]byte("{}\n"))
	f.Add([]byte(`{"hash_ids":[],"timestamp":-1}`))
	f.Add([]byte(`{"timestamp":1e9,"input_length":00,"output_length":9999999999999999999999,"hash_ids":[1,2`))
	f.Fuzz(func(t *testing.T, file []byte) {
		got, err := Decode("f", bytes.NewReader(file), 0)
		if err != nil {
			if !errors.Is(err, fault.Invalid) || !strings.HasPrefix(err.Error(), "f:") || fault.RemedyOf(err) == "" {
				t.Fatalf("error without kind, line or remedy: %v", err)
			}
			return
		}
		general := json.NewDecoder(bytes.NewReader(file))
		general.DisallowUnknownFields()
		var again bytes.Buffer
		for i, r := range got.Requests {
			if want, _ := Pages(r.Input, IDTokens); r.Time < 0 || r.Input < 1 || r.Output < 0 || len(r.IDs) != want {
				t.Fatalf("%s breaks the rules: %+v", got.Where(i), r)
			}
			var line traceLine
			if err := general.Decode(&line); err != nil {
				t.Fatalf("%s: accepted, but not JSON: %v", got.Where(i), err)
			}
			if d := cmp.Diff(r, Request{*line.Timestamp, *line.Input, *line.Output, *line.IDs}); d != "" {
				t.Fatalf("%s: not what encoding/json reads:\n%s", got.Where(i), d)
			}
			writeLine(&again, r)
		}
		if general.More() {
			t.Fatal("a request was skipped")
		}
		second, err := Decode("f", &again, 0)
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		if d := cmp.Diff(got.Requests, second.Requests); d != "" {
			t.Fatal(d)
		}
	})
}
