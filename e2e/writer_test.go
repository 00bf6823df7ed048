package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/dl"
)

// kvferry writes to nobody. That its library can is seen by a writer of this file's own,
// in a process of its own.

const writerVariable = "KVFERRY_E2E_WRITER"

// order is what is written: the contents of a seed, to an address of a peer's.
type order struct {
	Libraries []string
	Peer      string
	At, Seed  uint64
	Bytes     int
}

func startWriter(t *testing.T, o order) {
	t.Helper()
	exe := must(os.Executable())(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), writerVariable+"="+string(must(json.Marshal(o))(t)), "MC_FORCE_TCP=1", "MC_LOG_LEVEL=ERROR", "MC_TCP_BIND_ADDRESS=127.0.0.1")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
}

// write carries out an order, as a program in C would.
func write(text string) error {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	lib, err := dl.OpenAll(o.Libraries...)
	if err != nil {
		return err
	}
	block, err := dl.NewBlock(512)
	if err != nil {
		return err
	}
	memory, err := dl.NewBlock(o.Bytes/8 + 1)
	if err != nil {
		return err
	}
	copy(memory.Bytes, contents(o.Seed, int64(o.Bytes)))
	block.PutString(0, "P2PHANDSHAKE")
	block.PutString(100, "127.0.0.1:12345")
	block.PutString(200, "tcp")
	block.PutString(300, o.Peer)
	engine := lib.Find("createTransferEngine").Call(block.Addr, block.Addr+100, block.Addr+100, 0, 0)
	if engine == 0 || lib.Find("installTransport").Call(engine, block.Addr+200, 0) == 0 {
		return fmt.Errorf("no engine")
	}
	segment := int32(lib.Find("openSegment").Call(engine, block.Addr+300))
	if segment < 0 {
		return fmt.Errorf("segment: %d", segment)
	}
	const request, status, opWrite, completed, failed = 64, 80, 1, 4, 6 // words of the block
	copy(block.Words[request:], []uint64{opWrite, uint64(memory.Addr), uint64(uint32(segment)), o.At, uint64(o.Bytes)})
	batch := lib.Find("allocateBatchID").Call(engine, 1)
	if rc := int32(lib.Find("submitTransfer").Call(engine, batch, block.Addr+request*8, 1)); rc != 0 {
		return fmt.Errorf("submit: %d", rc)
	}
	for limit := time.Now().Add(patience); time.Now().Before(limit); runtime.Gosched() {
		if rc := int32(lib.Find("getTransferStatus").Call(engine, batch, 0, block.Addr+status*8)); rc != 0 {
			return fmt.Errorf("status: %d", rc)
		}
		switch int32(block.Words[status]) {
		case completed:
			return nil
		case failed:
			return fmt.Errorf("the write failed")
		}
	}
	return fmt.Errorf("the write does not end")
}
