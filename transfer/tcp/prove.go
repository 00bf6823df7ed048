package tcp

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"

	"github.com/kvferry/kvferry/fault"
)

// Both sides prove that they have the key, over what both have said and, with TLS, over
// keying material that only the two ends of this very connection have (RFC 9266). Each
// proves it in its own role, so that an answer can't be had from the other side itself;
// and over nonces of both, so that none of another connection is one of this.
const (
	readerLabel = "kvferry tcp reader\x00"
	ownerLabel  = "kvferry tcp owner\x00"

	bindingLabel = "EXPORTER-Channel-Binding"
	bindingBytes = 32
)

func prove(key []byte, label string, reader, owner *hello, binding []byte) []byte {
	h := hmac.New(sha256.New, key)
	var room [2 * helloBytes]byte
	_, _ = io.WriteString(h, label) // never fails, as below
	_, _ = h.Write(owner.append(reader.append(room[:0])))
	_, _ = h.Write(binding)
	return h.Sum(nil)
}

func newHello(mode, role byte) (h hello) {
	h = hello{version: version, mode: mode, role: role}
	_, _ = rand.Read(h.nonce[:]) // never fails
	return h
}

// proveReader is the reader's side of the handshake. Kinds: fault.Invalid (errKey; an
// answer that is none), fault.Unsupported (another version or mode), and errors of conn.
func proveReader(conn io.ReadWriter, key []byte, mode byte, binding []byte) error {
	mine := newHello(mode, rReader)
	if _, err := conn.Write(mine.append(nil)); err != nil {
		return err
	}
	theirs, err := readHello(conn, rOwner)
	if err != nil {
		return err
	}
	if theirs.mode != mode {
		return errMode(theirs.mode == modeTLS)
	}
	var proof [proofBytes]byte
	if _, err := io.ReadFull(conn, proof[:]); err != nil {
		return err
	}
	if !hmac.Equal(proof[:], prove(key, ownerLabel, &mine, &theirs, binding)) {
		_, _ = conn.Write(make([]byte, proofBytes)) // tells the other side why
		return errKey()
	}
	if _, err := conn.Write(prove(key, readerLabel, &mine, &theirs, binding)); err != nil {
		return err
	}
	var b [replyBytes]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return err
	}
	_, err = decodeReply(&b, sayDone)
	return err
}

// proveOwner is the owner's side. Kinds: those of proveReader.
func proveOwner(conn io.ReadWriter, key []byte, mode byte, binding []byte) error {
	theirs, err := readHello(conn, rReader)
	if err == nil && theirs.mode != mode {
		err = errMode(theirs.mode == modeTLS)
	}
	mine := newHello(mode, rOwner)
	if errors.Is(err, fault.Unsupported) {
		// What this side would have spoken, with nothing that proves anything: so the
		// other one can say what is wrong.
		mine.nonce = [nonceBytes]byte{}
		_, _ = conn.Write(append(mine.append(nil), make([]byte, proofBytes)...))
	}
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(mine.append(nil), prove(key, ownerLabel, &theirs, &mine, binding)...)); err != nil {
		return err
	}
	var proof [proofBytes]byte
	if _, err := io.ReadFull(conn, proof[:]); err != nil {
		return err
	}
	answer := reply{kind: sayDone}
	denied := !hmac.Equal(proof[:], prove(key, readerLabel, &theirs, &mine, binding))
	if denied {
		answer = reply{kind: sayFailed, code: codeDenied}
	}
	var b [replyBytes]byte
	answer.put(&b)
	_, err = conn.Write(b[:])
	if denied {
		return errKey()
	}
	return err
}

func readHello(conn io.Reader, role byte) (h hello, err error) {
	var b [helloBytes]byte
	if n, err := io.ReadFull(conn, b[:prefaceBytes]); err != nil {
		if n > 1 && bytes.HasPrefix(b[:], []byte{0x15, 3}) { // an alert of TLS may be all there is
			_, err = decodePreface((*[prefaceBytes]byte)(b[:]), role)
		}
		return h, err
	}
	if h, err = decodePreface((*[prefaceBytes]byte)(b[:]), role); err != nil {
		return h, err
	}
	_, err = io.ReadFull(conn, b[prefaceBytes:])
	copy(h.nonce[:], b[prefaceBytes:])
	return h, err
}
