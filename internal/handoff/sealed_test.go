package handoff

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
)

const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func TestMapSealed_ReadsWhatTheOwnerWrites(t *testing.T) {
	descriptors(t)
	fd := memfd(t, "before", sealed)
	ro, err := ReadOnly(fd)
	noError(t, err)
	b, err := MapSealed(ro, 6)
	noError(t, err)
	_, err = unix.Pwrite(fd, []byte("after!"), 0)
	noError(t, err)
	if _, err := unix.Pwrite(ro, []byte("x"), 0); err == nil {
		t.Error("the reader's descriptor can be written")
	}
	if _, err := unix.Mmap(ro, 0, 6, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("the reader's descriptor can be mapped for writing")
	}
	var st unix.Stat_t
	if err := unix.Fstat(ro, &st); err != nil || st.Mode&0o777 != 0o600 {
		t.Errorf("mode %#o, error %v: others can open it for writing", st.Mode, err)
	}
	noError(t, unix.Close(ro))
	if string(b) != "after!" {
		t.Errorf("the mapping reads %q", b)
	}
	noError(t, Unmap(b))
	wantKind(t, Unmap(b), fault.Memory, "unmap")
}

func TestMapSealed_RefusesWhatCanChangeUnderIt(t *testing.T) {
	descriptors(t)
	file, err := os.CreateTemp(t.TempDir(), "")
	noError(t, err)
	defer func() { noError(t, file.Close()) }()
	noError(t, file.Truncate(100))
	null, err := os.Open(os.DevNull)
	noError(t, err)
	defer func() { noError(t, null.Close()) }()
	good := memfd(t, "100 bytes", sealed)
	writer, err := os.OpenFile(procFile(good), os.O_WRONLY, 0)
	noError(t, err)
	defer func() { noError(t, writer.Close()) }()
	for name, x := range map[string]struct {
		fd   int
		size int64
		text string
	}{
		"a regular file":        {int(file.Fd()), 10, "shared memory"}, // on tmpfs it has a seal
		"a device":              {int(null.Fd()), 10, "not of a memfd"},
		"nothing":               {-1, 10, "not of a memfd"},
		"no seals":              {memfd(t, "100 bytes", 0), 9, "can be resized"},
		"it can shrink":         {memfd(t, "100 bytes", unix.F_SEAL_GROW|unix.F_SEAL_SEAL), 9, "can be resized"},
		"it can grow":           {memfd(t, "100 bytes", unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL), 9, "can be resized"},
		"its seals can be more": {memfd(t, "100 bytes", unix.F_SEAL_SHRINK|unix.F_SEAL_GROW), 9, "can be resized"},
		"too small":             {good, 10, "of 9 bytes, and 10 are needed"},
		"less than nothing":     {good, -1, "-1 are needed"},
		"nothing of it":         {good, 0, "can't be mapped"},
		"not for reading":       {int(writer.Fd()), 9, "not for reading"},
	} {
		if b, err := MapSealed(x.fd, x.size); b != nil {
			t.Errorf("%s was mapped", name)
		} else {
			wantKind(t, err, fault.Invalid, x.text)
		}
	}
	_, err = ReadOnly(-1)
	wantKind(t, err, fault.Invalid, "descriptor -1")
}
