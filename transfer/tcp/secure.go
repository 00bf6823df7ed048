package tcp

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"time"

	"github.com/kvferry/kvferry/fault"
)

// secrets are both sides' configurations of TLS.
type secrets struct{ owner, reader *tls.Config }

// newSecrets makes a certificate that lasts as long as the engine. Nobody looks at it:
// the ends of a connection are known by their proofs, which cover its keys.
func newSecrets() (*secrets, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fault.Wrap(fault.Unsupported, "TLS", err)
	}
	now := time.Now()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: now.Add(-24 * time.Hour), NotAfter: now.AddDate(20, 0, 0)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fault.Wrap(fault.Unsupported, "TLS", err)
	}
	return &secrets{
		owner: &tls.Config{
			MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
			Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		},
		reader: &tls.Config{
			MinVersion: tls.VersionTLS13, DynamicRecordSizingDisabled: true,
			InsecureSkipVerify: true, // there is no name to verify: see above
		},
	}, nil
}

// secure is the handshake of TLS. It returns what only the two ends know.
func secure(ctx context.Context, c *tls.Conn) (binding []byte, err error) {
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	state := c.ConnectionState()
	return state.ExportKeyingMaterial(bindingLabel, nil, bindingBytes)
}

// eager is a connection whose writes never wait: they send what can be sent at once, and
// a rest is an error.
type eager struct {
	*net.TCPConn
	raw rawConn
}

func (c *eager) Write(b []byte) (n int, err error) {
	rawErr := c.raw.Write(func(fd uintptr) bool {
		n, err = writeOnce(int(fd), b)
		return true
	})
	if err == nil {
		err = rawErr
	}
	if err == nil && n < len(b) {
		err = fault.New(fault.Busy, "owner", "doesn't take what it is told")
	}
	return n, err
}
