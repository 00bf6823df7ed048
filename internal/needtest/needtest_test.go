package needtest

import (
	"runtime"
	"testing"
)

// ended is a test that says how it was ended.
type ended struct {
	testing.TB
	how string
}

func (*ended) Helper()        {}
func (e *ended) Fatal(...any) { e.how = "failed"; runtime.Goexit() }
func (e *ended) Skip(...any)  { e.how = "skipped"; runtime.Goexit() }

func TestMissing_IsAFailureInCI(t *testing.T) {
	for ci, want := range map[string]string{"": "skipped", "true": "failed"} {
		t.Setenv("CI", ci)
		e := &ended{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			Missing(e, "no compiler")
			e.how = "went on"
		}()
		if <-done; e.how != want {
			t.Errorf("with CI=%q the test %s, want it %s", ci, e.how, want)
		}
	}
}
