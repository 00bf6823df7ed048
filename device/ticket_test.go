package device

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
)

func TestTicket_KeepsItsFirstOutcome(t *testing.T) {
	first := errors.New("first")
	ticket := NewTicket()
	if done, err := ticket.Poll(); done || err != nil {
		t.Errorf("new ticket: done %v, error %v", done, err)
	}
	early := ticket.Done()
	if !ticket.Complete(first) || ticket.Complete(nil) {
		t.Error("the first completion counts, and only that")
	}
	<-early
	<-ticket.Done()
	if done, err := ticket.Poll(); !done || err != first {
		t.Errorf("done %v, error %v, want the first", done, err)
	}
	if err := ticket.Wait(context.Background()); err != first {
		t.Errorf("wait gives %v, want the first", err)
	}
}

func TestTicket_CompletedIsDone(t *testing.T) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	ticket := Completed(nil)
	<-ticket.Done()
	if err := ticket.Wait(ended); err != nil {
		t.Errorf("work that is done gives %v when the context has ended too", err)
	}
}

func TestTicket_WaitEndsWithItsContextAndLeavesTheTicketOpen(t *testing.T) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	ticket := NewTicket()
	if err := ticket.Wait(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("wait gives %v, want %v", err, context.Canceled)
	}
	if !ticket.Complete(nil) {
		t.Error("giving up has completed the ticket")
	}
}

func TestTicket_IsCompletedOnceByManyAndSeenByAll(t *testing.T) {
	ticket := NewTicket()
	var all sync.WaitGroup
	var won atomic.Int32
	for range 16 {
		all.Go(func() {
			if err := ticket.Wait(context.Background()); err != nil {
				t.Error(err)
			}
		})
		all.Go(func() {
			if ticket.Complete(nil) {
				won.Add(1)
			}
		})
	}
	all.Wait()
	if won.Load() != 1 {
		t.Errorf("%d completions count, want 1", won.Load())
	}
}

func TestTicket_NotifyTellsOfManyByOneChannel(t *testing.T) {
	var tickets [3]Ticket
	told := make(chan struct{}, 1)
	for i := range tickets {
		tickets[i].Notify(told)
	}
	select {
	case <-told:
		t.Fatal("told before any was done")
	default:
	}
	for i := range tickets {
		if !tickets[i].Complete(nil) || tickets[i].Complete(nil) {
			t.Fatal("a ticket is completed once")
		}
	}
	<-told // the others found it full, and did not wait
	select {
	case <-told:
		t.Fatal("told twice, with room for one")
	default:
	}
}
