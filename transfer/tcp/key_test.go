package tcp

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/fault/faulttest"
)

func TestKeyFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "key")
	noError(t, NewKeyFile(name))
	key, err := ReadKeyFile(name)
	noError(t, err)
	if len(key) != MinKeyBytes || bytes.Equal(key, make([]byte, MinKeyBytes)) {
		t.Errorf("key %x", key)
	}
	st, err := os.Stat(name)
	noError(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Errorf("made with the rights %v", st.Mode())
	}
	faulttest.Refused(t, NewKeyFile(name), fault.Exists, name)
	again, err := ReadKeyFile(name)
	noError(t, err)
	if !bytes.Equal(again, key) {
		t.Error("a key that was there is another one now")
	}
	faulttest.Refused(t, NewKeyFile(filepath.Join(name, "below a file")), fault.Invalid, name)
	_, err = ReadKeyFile(name + "x")
	faulttest.Refused(t, err, fault.NotFound, name+"x")
}

func TestReadKeyFile_Refuses(t *testing.T) {
	dir := t.TempDir()
	good := hex.EncodeToString(testKey())
	for _, c := range []struct {
		name, text string
		mode       os.FileMode
		says       string
	}{
		{"others read", good, 0o604, "others may read"},
		{"others write", good, 0o602, "others may read or change"},
		{"group writes", good, 0o620, "others may read or change"},
		{"empty", "", 0o600, "hexadecimal"},
		{"short", good[:62], 0o600, "hexadecimal"},
		{"no hexadecimal", strings.Repeat("x", 64), 0o600, "hexadecimal"},
		{"two", good + "\n" + good, 0o600, "hexadecimal"},
		{"long", strings.Repeat(good, 40), 0o600, "hexadecimal"},
	} {
		name := filepath.Join(dir, c.name)
		noError(t, os.WriteFile(name, []byte(c.text), c.mode))
		noError(t, os.Chmod(name, c.mode))
		_, err := ReadKeyFile(name)
		faulttest.Refused(t, err, fault.Invalid, name, c.says)
		if c.text != "" && strings.Contains(err.Error()+fault.RemedyOf(err), c.text) {
			t.Errorf("%s: the error has the file's contents", c.name)
		}
	}
	_, err := ReadKeyFile(dir)
	faulttest.Refused(t, err, fault.Invalid, "not a regular file")
	pipe := filepath.Join(dir, "pipe")
	noError(t, unix.Mkfifo(pipe, 0o600))
	_, err = ReadKeyFile(pipe)
	faulttest.Refused(t, err, fault.Invalid, "not a regular file")
}

func TestCheckRights(t *testing.T) {
	const file = unix.S_IFREG
	for _, c := range []struct {
		st   unix.Stat_t
		good bool
	}{
		{unix.Stat_t{Uid: 7, Mode: file | 0o600}, true},
		{unix.Stat_t{Uid: 7, Mode: file | 0o400}, true},
		{unix.Stat_t{Uid: 7, Mode: file | 0o640}, false},
		{unix.Stat_t{Uid: 0, Mode: file | 0o640}, true}, // a secret of a container
		{unix.Stat_t{Uid: 0, Mode: file | 0o660}, false},
		{unix.Stat_t{Uid: 0, Mode: file | 0o644}, false},
		{unix.Stat_t{Uid: 8, Mode: file | 0o600}, false},
		{unix.Stat_t{Uid: 7, Mode: unix.S_IFIFO | 0o600}, false},
	} {
		if err := checkRights("key", &c.st, 7); (err == nil) != c.good {
			t.Errorf("user %d, mode %#o: error %v", c.st.Uid, c.st.Mode, err)
		}
	}
}
