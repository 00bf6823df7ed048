module github.com/kvferry/kvferry/e2e

go 1.26.0

require (
	github.com/kvferry/kvferry v0.0.0
	golang.org/x/sys v0.50.0
)

require (
	github.com/ebitengine/purego v0.11.3 // indirect
	github.com/klauspost/cpuid/v2 v2.2.10 // indirect
	github.com/zeebo/xxh3 v1.1.0 // indirect
	go.uber.org/goleak v1.3.0 // indirect
)

replace github.com/kvferry/kvferry => ../
