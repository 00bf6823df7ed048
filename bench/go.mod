module github.com/kvferry/kvferry/bench

go 1.26.0

require (
	github.com/hashicorp/golang-lru/v2 v2.0.7
	github.com/kvferry/kvferry v0.0.0
	github.com/maypok86/otter/v2 v2.4.0
	golang.org/x/sys v0.50.0
)

require (
	github.com/klauspost/cpuid/v2 v2.2.10 // indirect
	github.com/zeebo/xxh3 v1.1.0 // indirect
)

replace github.com/kvferry/kvferry => ../
