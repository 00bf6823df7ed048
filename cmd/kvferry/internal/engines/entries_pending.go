package engines

import (
	"context"

	"github.com/kvferry/kvferry/cmd/kvferry/internal/accel"
	"github.com/kvferry/kvferry/fault"
	"github.com/kvferry/kvferry/transfer"
)

const mooncakeWarning = "whoever reaches Mooncake's ports can read what is served, and write it: it asks nobody who they are"

func notThere(*Options, Side, *accel.Opened) (what, remedy string) {
	return "it is not in this build", "choose another engine"
}

func openNothing(context.Context, *Options, Side, *accel.Opened) (transfer.Engine, error) {
	return nil, fault.New(fault.Unsupported, "engine", "not in this build")
}

// reachedMooncake says where Mooncake listens.
func (s *Set) reachedMooncake() string {
	if s.o.MooncakeListen == "" {
		return Mooncake + " on 127.0.0.1"
	}
	return Mooncake + " on " + s.o.MooncakeListen
}
