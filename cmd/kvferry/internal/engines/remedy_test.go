package engines

import (
	"context"
	"io/fs"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer/tcp"
)

func TestRemedy_IsInWordsOfFlags(t *testing.T) {
	s := &Set{o: Options{Mooncake: []string{"libfoo.so", "/opt/libtransfer_engine.so"}}}
	socket := func(err error) error {
		return fault.Wrap(fault.NotFound, "socket s", err).Hint("its owner has closed, or has its sockets in another directory")
	}
	for _, tc := range []struct {
		engine string
		err    error
		want   string // how it begins
	}{
		{TCP, fault.Wrap(fault.Unsupported, "owner", &tcp.ModeError{TLS: true}).Hint("set TLS"), "give --tls here too"},
		{TCP, fault.Wrap(fault.Unsupported, "owner", &tcp.ModeError{}).Hint("set TLS"), "leave --tls out"},
		{TCP, fault.Wrap(fault.NotFound, "owner", unix.ECONNREFUSED).Hint("see"), "is kvferry transfer serve still running, and does it listen on this address?"},
		{HostIPC, socket(unix.ECONNREFUSED), ""},
		{HostIPC, socket(unix.ENOENT), "its owner has closed, or has its sockets in another directory (XDG_RUNTIME_DIR)"},
		{CUDAIPC, socket(fs.ErrNotExist), "its owner has closed, or has its sockets in another directory (XDG_RUNTIME_DIR)"},
		{HostIPC, socket(unix.ENOTDIR), "its owner has closed, or has its sockets in another directory (XDG_RUNTIME_DIR)"},
		{HostIPC, fault.New(fault.NotFound, "owner", "has closed").Hint("ask it to publish again"), ""},
		{TCP, fault.New(fault.Full, "owner", "has all readers").Hint("let in more: tcp.Options.MaxConns"), "try again when other readers have ended"},
		{TCP, fault.Wrap(fault.Device, "owner", unix.ENETUNREACH).Hint("see whether there is a way"), "see whether there is a way"},
		{TCP, fault.Wrap(fault.Busy, "owner", context.DeadlineExceeded).Hint("allow more time: Options.Deadline"), ""},
		{TCP, nil, ""},
		{Mooncake, fault.New(fault.NotFound, "", "libfoo.so: cannot open shared object file"), "give --mooncake-library the files"},
		{Mooncake, fault.New(fault.Unsupported, "/opt/libtransfer_engine.so", "is not Mooncake's").Hint("name it last"), "give --mooncake-library the files"},
		{Mooncake, fault.New(fault.NotFound, "owner", "has gone").Hint("ask it to publish again"), ""},
		{Mooncake, fault.New(fault.Device, "child", "libfoo.so: crashed").Hint("wait for 1s"), "wait for 1s"},
	} {
		got := s.Remedy(tc.engine, tc.err)
		if !strings.HasPrefix(got, tc.want) || (tc.want == "") != (got == "") {
			t.Errorf("%s: %v: %q, want %q", tc.engine, tc.err, got, tc.want)
		}
	}
}

func TestMissing_NamesEnginesThatWereLeftOut(t *testing.T) {
	for _, tc := range []struct {
		names   []string
		offered []string
		want    string
	}{
		{[]string{TCP}, []string{HostIPC}, "add hostipc to --engine, or leave that out"},
		{[]string{HostIPC}, []string{TCP}, keyRemedy},
		{nil, []string{HostIPC}, "use one engine on both sides: --engine"},
		{nil, []string{"pigeon"}, "use one engine on both sides: --engine"},
		{[]string{Mooncake}, []string{HostIPC, TCP}, "add hostipc to --engine, or leave that out; or " + keyRemedy},
	} {
		s := &Set{o: Options{Names: tc.names}}
		if got := s.Missing(tc.offered); got != tc.want {
			t.Errorf("%q of %q: %q, want %q", tc.names, tc.offered, got, tc.want)
		}
	}
}

func TestOpen_RefusesAMooncakeLibraryThatIsNotThere(t *testing.T) {
	_, err := Open(t.Context(), Options{Mooncake: []string{"/nonexistent/lib.so"}}, Reader, onHostDevice(t))
	if fault.KindOf(err) != fault.NotFound || !strings.Contains(err.Error(), "--mooncake-library: stat /nonexistent/lib.so") || fault.RemedyOf(err) != libraryRemedy {
		t.Errorf("%v, remedy %q", err, fault.RemedyOf(err))
	}
}
