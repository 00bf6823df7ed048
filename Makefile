# `make help` lists the targets. Go alone builds and runs kvferry; make and a C
# compiler are needed for the tests only (the race detector links C, and tests make
# libraries to call).

GO      ?= go
FUZZTIME ?= 10s
TOOL     = $(GO) tool -modfile=tools/go.mod
PURE     = CGO_ENABLED=0 $(GO)

.DEFAULT_GOAL := help
.PHONY: help build test lint race plain cross arm64 fuzz e2e replay trace vendor gpucheck readme clean compiler
# One thing after the other: each of them uses all cores.
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z0-9]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

build: ## make bin/kvferry: one binary that needs only libc (nothing, with GOFLAGS=-tags=nogpu)
	$(PURE) build -trimpath -o bin/kvferry ./cmd/kvferry

test: compiler lint race plain cross arm64 fuzz replay ## everything that must pass before a commit
	@echo "make test: all passed"

lint: ## golangci-lint for every build and module, and go.mod as go mod tidy would write it
	@lint=$$($(TOOL) -n golangci-lint) && set -x && $$lint run && \
		GOARCH=arm64 CGO_ENABLED=0 $$lint run --build-tags invariants && \
		$$lint run --build-tags nogpu ./internal/dl/... && \
		(cd bench && $$lint run) && cd e2e && $$lint run
	$(GO) mod tidy -diff

race: compiler ## tests with the race detector and with invariants checked
	CGO_ENABLED=1 $(GO) test -race -tags invariants ./...

plain: ## tests as users build the code: no C, no checks
	$(PURE) test ./...
	CGO_ENABLED=0 $(GO) -C bench test ./...
	$(PURE) vet -tags nogpu ./...
	$(PURE) test -tags nogpu ./internal/dl

cross: ## build for arm64, and type-check the tests there
	GOARCH=arm64 $(PURE) build -o /dev/null ./cmd/kvferry
	GOARCH=arm64 $(PURE) vet ./...

arm64: ## tests of the calls into C on arm64, with qemu-user and a cross compiler
	GO="$(GO)" tools/arm64 ./internal/dl

fuzz: ## fuzz every target for FUZZTIME (default 10s)
	GO="$(GO)" tools/fuzz $(FUZZTIME)

replay: build ## replay 2,000 requests of the built-in load, every byte checked
	bin/kvferry replay --requests 2000

trace: build ## replay the whole real trace, every byte checked
	tools/trace bin/kvferry replay --trace

e2e: ## exchange pages with real peers of others, which are fetched
	e2e/fetch
	CGO_ENABLED=0 $(GO) -C e2e test ./...

vendor: ## fetch what tests check against: NVIDIA's headers and runtime libraries, Mooncake
	tools/vendor
	e2e/fetch

gpucheck: ## build bin/gpucheck: files that check a machine with a GPU, and need only libc there
	mkdir -p bin/gpucheck
	$(PURE) build -trimpath -o bin/gpucheck/kvferry ./cmd/kvferry
	$(PURE) test -c -trimpath -o bin/gpucheck/gpu.test ./cmd/kvferry/internal/gpucheck
	$(PURE) test -c -trimpath -o bin/gpucheck/kv.test ./kv
	$(PURE) test -c -trimpath -o bin/gpucheck/kvferry.test .
	cp tools/gpucheck bin/gpucheck/gpucheck

readme: ## run the README's first command and put its output into the README
	GO="$(GO)" tools/readme

clean: ## remove what was built, and the fake drivers that tests have compiled
	rm -rf bin
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/kvferry-fakedriver"

compiler:
	@cc=$$($(GO) env CC) && command -v $$cc >/dev/null || \
		{ echo "make: no C compiler ($$cc): the race detector needs one (Debian: apt-get install gcc libc6-dev)"; \
		  echo "make: without one, 'make plain' runs the tests without the race detector"; exit 1; }
