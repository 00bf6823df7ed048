package abi

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/needtest"
)

// headers are the headers of one version that the tables are held to.
type headers struct {
	golden   string // in testdata
	vendor   string // folder of headers below $KVFERRY_VENDOR, or a path
	include  string
	define   string
	result   string // of every call but those that name an error
	version  int
	tables   []Table
	released string // the expression that is the version of the headers, in C
}

func allHeaders() []headers {
	cuda := headers{
		include: "#include <cuda.h>\n#include <cudaTypedefs.h>\n#include <cuda_runtime_api.h>", result: "CUresult",
		tables: []Table{CUDA(), CUDART()}, released: "CUDA_VERSION",
	}
	cuda128, cuda130 := cuda, cuda
	cuda128.golden, cuda128.vendor, cuda128.version = "cuda-12.8.txt", "cuda-12.8/include", 12080
	cuda130.golden, cuda130.vendor, cuda130.version = "cuda-13.0.txt", "cuda-13.0/include", 13000
	return []headers{cuda128, cuda130, {
		golden: "hip-5.2.txt", vendor: "/usr/include", version: 50200000, result: "hipError_t",
		define: "#define __HIP_PLATFORM_AMD__ 1", include: "#include <hip/hip_runtime_api.h>",
		tables: []Table{HIP()}, released: "HIP_VERSION / 100000 * 100000",
	}}
}

// TestTables_AreWhatTheHeadersSay holds the tables to text that was made from the
// vendors' headers.
func TestTables_AreWhatTheHeadersSay(t *testing.T) {
	for _, h := range allHeaders() {
		t.Run(h.golden, func(t *testing.T) {
			want, err := os.ReadFile(filepath.Join("testdata", h.golden))
			if err != nil {
				t.Fatal(err)
			}
			if got := h.text(); got != string(want) {
				t.Errorf("the tables differ from testdata/%s:\n%s", h.golden, difference(string(want), got))
			}
		})
	}
}

// TestGoldens_AreWhatTheHeadersSay has the C compiler write the text from the headers
// themselves. To write testdata anew, set KVFERRY_WRITE_GOLDENS.
func TestGoldens_AreWhatTheHeadersSay(t *testing.T) {
	for _, h := range allHeaders() {
		t.Run(h.golden, func(t *testing.T) {
			dir := h.vendor
			if !filepath.IsAbs(dir) {
				dir = filepath.Join(vendorDir(), dir)
			}
			got, err := compile(t, dir, h.program())
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", h.golden)
			if os.Getenv("KVFERRY_WRITE_GOLDENS") != "" {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("the headers in %s differ from %s:\n%s", dir, file, difference(string(want), got))
			}
		})
	}
}

// TestProgram_RefusesWhatIsWrong breaks a table on purpose, one way after the other, and
// wants the compiler or the text to say so.
func TestProgram_RefusesWhatIsWrong(t *testing.T) {
	for name, damage := range map[string]func(*Table){
		"an offset": func(x *Table) {
			x.Layouts = []Layout{{Name: "CUmemAccessDesc", Bytes: 12, Fields: []Field{{"flags", 4, 4}}}}
		},
		"a size":      func(x *Table) { x.Layouts = []Layout{{Name: "CUmemAccessDesc", Bytes: 16}} },
		"a number":    func(x *Table) { x.Constants = []Constant{{"CU_MEM_ACCESS_FLAGS_PROT_READWRITE", 0, 2}} },
		"a code":      func(x *Table) { x.Errors = []Error{{Code: 3, Name: "CUDA_ERROR_OUT_OF_MEMORY"}} },
		"an argument": func(x *Table) { x.Calls = []Call{{"cuMemAlloc", "cuMemAlloc_v2", 3020, "CUdeviceptr*, int", false}} },
		"a form": func(x *Table) {
			x.Calls = []Call{{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", CUDABatch8, cudaCalls[CuMemcpyBatchAsync].Args, true}}
		},
		"a version": func(x *Table) { x.Calls = []Call{{"cuMemAlloc", "cuMemAlloc_v2", 3021, "CUdeviceptr*, size_t", false}} },
	} {
		t.Run(name, func(t *testing.T) {
			h := allHeaders()[1]
			h.tables = []Table{{}}
			damage(&h.tables[0])
			got, err := compile(t, filepath.Join(vendorDir(), h.vendor), h.program())
			if err == nil && got == h.text() {
				t.Errorf("a table with %s that is wrong agrees with the headers", name)
			}
		})
	}
}

// vendorDir is where the headers and runtimes of vendors are.
func vendorDir() string {
	if dir := os.Getenv("KVFERRY_VENDOR"); dir != "" {
		return dir
	}
	return filepath.Join("..", "..", ".vendor")
}

// compile runs a C program over the headers in dir and returns what it writes.
func compile(tb testing.TB, dir, program string) (string, error) {
	tb.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		needtest.Missing(tb, "no C compiler: "+err.Error())
	}
	if _, err := os.Stat(dir); err != nil {
		needtest.Missing(tb, "no headers: "+err.Error())
	}
	src, bin := filepath.Join(tb.TempDir(), "table.c"), filepath.Join(tb.TempDir(), "table")
	if err := os.WriteFile(src, []byte(program), 0o644); err != nil {
		tb.Fatal(err)
	}
	out, err := exec.CommandContext(tb.Context(), cc, "-w", "-I", dir, "-o", bin, src).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", cc, err, out)
	}
	out, err = exec.CommandContext(tb.Context(), bin).Output()
	return string(out), err
}

// text writes the tables.
func (h headers) text() string {
	var b bytes.Buffer
	fmt.Fprintln(&b, "version", h.version)
	for _, x := range h.tables {
		for _, l := range h.layouts(x) {
			fmt.Fprintf(&b, "%s %d\n", l.Name, l.Bytes)
			for _, f := range l.Fields {
				fmt.Fprintf(&b, "  %s %d %d\n", f.Name, f.Off, f.Bytes)
			}
		}
		for _, c := range h.constants(x) {
			fmt.Fprintf(&b, "%s %d\n", c.Name, c.Value)
		}
		for _, c := range h.calls(x) {
			fmt.Fprintf(&b, "%s %d %s (%s)\n", c.Export(), c.Version, h.resultOf(c), c.Args)
		}
	}
	return b.String()
}

// program is a C program that writes the same from the headers, and that does not
// compile when a call has other arguments.
func (h headers) program() string {
	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("%s\n#include <stddef.h>\n#include <stdio.h>\n%s\nint main(void) {", h.define, h.include)
	line(`printf("version %%d\n", (int)(%s));`, h.released)
	for _, x := range h.tables {
		for _, l := range h.layouts(x) {
			line(`printf("%s %%zu\n", sizeof(%s));`, l.Name, l.Name)
			for _, f := range l.Fields {
				line(`printf("  %s %%zu %%zu\n", offsetof(%s, %s), sizeof(((%s*)0)->%s));`, f.Name, l.Name, f.Name, l.Name, f.Name)
			}
		}
		for _, c := range h.constants(x) {
			line(`printf("%s %%d\n", (int)(%s));`, c.Name, c.Name)
		}
		for _, c := range h.calls(x) {
			form := fmt.Sprintf("%s (*)(%s)", h.resultOf(c), c.Args)
			if !superseded(x, c, h.version) { // by then the name is a macro of the newer form
				line(`_Static_assert(__builtin_types_compatible_p(__typeof__(&%s), %s), "%s");`, c.Export(), form, c.Export())
			}
			if strings.HasPrefix(c.Name, "cu") && c.Version > 0 && !strings.HasPrefix(c.Name, "cuda") {
				line(`_Static_assert(__builtin_types_compatible_p(PFN_%s_v%d, %s), "%s");`, c.Name, c.Version, form, c.Name)
			}
			line(`printf("%%s\n", "%s %d %s (%s)");`, c.Export(), c.Version, h.resultOf(c), c.Args)
		}
	}
	line("return 0;\n}")
	return b.String()
}

func (h headers) resultOf(c Call) string {
	switch {
	case c.Name == "cudaGetErrorName" || c.Name == "hipGetErrorName":
		return "const char*"
	case strings.HasPrefix(c.Name, "cuda"):
		return "cudaError_t"
	}
	return h.result
}

func (h headers) layouts(x Table) []Layout {
	return slices.DeleteFunc(slices.Clone(x.Layouts), func(l Layout) bool { return l.Since > h.version })
}

// constants are those of the version, errors among them.
func (h headers) constants(x Table) []Constant {
	all := slices.Clone(x.Constants)
	for _, e := range x.Errors {
		if e.Name == "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER" && h.version < 13000 {
			continue // has its number, and no name
		}
		all = append(all, Constant{Name: e.Name, Value: e.Code})
	}
	return slices.DeleteFunc(all, func(c Constant) bool { return c.Since > h.version })
}

// calls are the forms that the headers of the version declare: of two under one name,
// the newer.
func (h headers) calls(x Table) []Call {
	all := slices.DeleteFunc(slices.Clone(x.Calls), func(c Call) bool { return c.Version > h.version })
	return slices.DeleteFunc(slices.Clone(all), func(c Call) bool {
		return slices.ContainsFunc(all, func(o Call) bool { return o.Export() == c.Export() && o.Version > c.Version })
	})
}

// superseded reports whether the headers of a version have a newer form of c.
func superseded(x Table, c Call, version int) bool {
	return slices.ContainsFunc(x.Calls, func(o Call) bool {
		return o.Name == c.Name && o.Version > c.Version && o.Version <= version
	})
}

// difference returns the lines that only one of two texts has.
func difference(want, got string) string {
	var b strings.Builder
	a, c := strings.Split(want, "\n"), strings.Split(got, "\n")
	for _, line := range a {
		if !slices.Contains(c, line) {
			fmt.Fprintln(&b, "-", line)
		}
	}
	for _, line := range c {
		if !slices.Contains(a, line) {
			fmt.Fprintln(&b, "+", line)
		}
	}
	return b.String()
}
