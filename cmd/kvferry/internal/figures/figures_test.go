package figures

import "testing"

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 128 << 10: "128 KiB", 5 << 28: "1.25 GiB", 1<<30 + 1<<28 + 1<<26: "1.31 GiB",
		1_395_864_371: "1.30 GiB", 100<<20 + 1: "100 MiB", 3 << 50: "3072 TiB", 1 << 62: "4194304 TiB",
	} {
		if got := Size(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestThree(t *testing.T) {
	for v, want := range map[float64]string{0: "0.00", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 1234.5: "1234"} {
		if got := Three(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}

func TestPlural(t *testing.T) {
	if a, b, c := Plural(1, "page", "pages"), Plural(0, "page", "pages"), Plural(int64(2), "page", "pages"); a != "page" || b != "pages" || c != "pages" {
		t.Errorf("%s, %s, %s", a, b, c)
	}
}
