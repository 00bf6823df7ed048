#include "textflag.h"

// Rows lie in a table of (destination, source) pairs at DX. BX is how far all
// lanes have come, CX where they end. Each lane copies one step of 128 bytes and
// gives way to the next; the processor runs the loads of many lanes at once.

#define LANE_AVX2(pair, store) \
	MOVQ    pair+8(DX), SI; \
	MOVQ    pair+0(DX), DI; \
	VMOVDQU 0(SI)(BX*1), Y0; \
	VMOVDQU 32(SI)(BX*1), Y1; \
	VMOVDQU 64(SI)(BX*1), Y2; \
	VMOVDQU 96(SI)(BX*1), Y3; \
	store   Y0, 0(DI)(BX*1); \
	store   Y1, 32(DI)(BX*1); \
	store   Y2, 64(DI)(BX*1); \
	store   Y3, 96(DI)(BX*1)

#define LANE_AVX512(pair) \
	MOVQ      pair+8(DX), SI; \
	MOVQ      pair+0(DX), DI; \
	VMOVDQU64 0(SI)(BX*1), Z0; \
	VMOVDQU64 64(SI)(BX*1), Z1; \
	VMOVNTDQ  Z0, 0(DI)(BX*1); \
	VMOVNTDQ  Z1, 64(DI)(BX*1)

// func copyAVX2(rows *[maxLanes]row, n uintptr)
TEXT ·copyAVX2(SB), NOSPLIT, $0-16
	MOVQ rows+0(FP), DX
	MOVQ n+8(FP), CX
	XORQ BX, BX

loop:
	LANE_AVX2(0, VMOVDQU)
	LANE_AVX2(16, VMOVDQU)
	LANE_AVX2(32, VMOVDQU)
	LANE_AVX2(48, VMOVDQU)
	ADDQ $128, BX
	CMPQ BX, CX
	JB   loop
	VZEROUPPER
	RET

// Non-temporal stores are weakly ordered: another core may see them after
// ordinary stores that come later in the program, such as those that say that
// the copy is done. SFENCE ends that before the kernel returns, so that nobody
// else has to know. Beside the copy of several rows it costs nothing. (No test
// can show what happens without it: goroutines meet by locked instructions, and
// on the processors that there are those wait for the stores as well.)

// func streamAVX2(rows *[maxLanes]row, n uintptr)
TEXT ·streamAVX2(SB), NOSPLIT, $0-16
	MOVQ rows+0(FP), DX
	MOVQ n+8(FP), CX
	XORQ BX, BX

loop:
	LANE_AVX2(0, VMOVNTDQ)
	LANE_AVX2(16, VMOVNTDQ)
	LANE_AVX2(32, VMOVNTDQ)
	LANE_AVX2(48, VMOVNTDQ)
	LANE_AVX2(64, VMOVNTDQ)
	LANE_AVX2(80, VMOVNTDQ)
	LANE_AVX2(96, VMOVNTDQ)
	LANE_AVX2(112, VMOVNTDQ)
	ADDQ $128, BX
	CMPQ BX, CX
	JB   loop
	SFENCE
	VZEROUPPER
	RET

// func streamAVX512(rows *[maxLanes]row, n uintptr)
TEXT ·streamAVX512(SB), NOSPLIT, $0-16
	MOVQ rows+0(FP), DX
	MOVQ n+8(FP), CX
	XORQ BX, BX

loop:
	LANE_AVX512(0)
	LANE_AVX512(16)
	LANE_AVX512(32)
	LANE_AVX512(48)
	LANE_AVX512(64)
	LANE_AVX512(80)
	LANE_AVX512(96)
	LANE_AVX512(112)
	ADDQ $128, BX
	CMPQ BX, CX
	JB   loop
	SFENCE
	VZEROUPPER
	RET
