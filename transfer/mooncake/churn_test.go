package mooncake_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/device"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/page"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/mooncake"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// An owner publishes, ends and reuses its pages at random while others read them. A read
// that succeeds has the bytes of its own publication, whatever came after it; one that
// doesn't says that they are gone.
func TestEngine_ReadsNothingOfWhatCameLater(t *testing.T) {
	rounds := 15
	if n, err := strconv.Atoi(os.Getenv("KVFERRY_CHURN")); err == nil {
		rounds = n
	}
	leavesNothing(t)
	need(t)
	for _, inside := range []bool{false, true} {
		c := big
		c.Pages, c.Layers = 32, 2
		g := must(c.PageMajor())(t)
		served := must(transfertest.Serve(must(side(mooncake.Options{}))(t), g, 1))(t)
		host := must(device.OpenHost(device.HostOptions{}))(t)
		cache, image := must(kv.NewCache(g, host))(t), must(kv.NewCache(g, host))(t)
		s := must(side(mooncake.Options{InProcess: inside}))(t)
		reader := must(transfer.NewReader(transfer.Options{Cache: cache, Device: host, Engines: []transfer.Engine{s.Engine}}))(t)
		seeds := rand.New(rand.NewPCG(5, 6))
		var good, gone int
		for round := range rounds {
			seed := uint64(round + 1)
			d := must(transfer.Decode(must(served.Publish(ids(0, c.Pages), round%3 == 0, time.Minute))(t)))(t)
			noError(t, served.Drop(ids(0, c.Pages)))
			noError(t, transfertest.Fill(image, seed, ids(0, c.Pages)))
			early := time.Duration(seeds.Int64N(int64(15 * time.Millisecond)))
			var over sync.WaitGroup
			over.Go(func() {
				<-time.After(early)
				noError(t, served.End(d.Epoch))
				must(served.Reuse(seed + 1))(t)
			})
			half := c.Pages / 2
			outcomes := make([]error, 2)
			for i := range outcomes {
				over.Go(func() {
					outcomes[i] = reader.Retrieve(t.Context(), 0, half*c.PageSize, ids(i*half, half), ids(i*half, half), d)
				})
			}
			over.Wait()
			for i, err := range outcomes {
				switch {
				case errors.Is(err, fault.NotFound):
					gone++
				case err != nil:
					t.Fatalf("in process %t, round %d: %v", inside, round, err)
				default:
					good++
					same(t, cache, image, ids(i*half, half))
				}
			}
		}
		t.Logf("in process %t: %d reads were right, %d too late", inside, good, gone)
		noError(t, errors.Join(reader.Close(), s.Engine.Close(), served.Close(), cache.Close(), image.Close(), host.Close()))
	}
}

func same(t *testing.T, a, b *kv.Cache, pages []page.ID) {
	t.Helper()
	for layer := range a.Geometry().Layers() {
		for plane := range 2 {
			for _, id := range pages {
				if !bytes.Equal(must(a.Plane(layer, plane, id))(t), must(b.Plane(layer, plane, id))(t)) {
					t.Fatalf("page %d has bytes of another publication", id)
				}
			}
		}
	}
}
