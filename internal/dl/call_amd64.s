//go:build !nogpu

#include "textflag.h"

// void unpack(struct words *w): w in DI. Frame: 64 bytes of stack arguments, 8 for w,
// 8 of alignment; the stack is a multiple of 16 at the call.
TEXT unpack<>(SB), NOSPLIT, $80
	MOVQ DI, 72(SP)
	MOVQ DI, R11
	MOVQ 56(R11), AX  // arguments 6 to 13
	MOVQ AX, 0(SP)
	MOVQ 64(R11), AX
	MOVQ AX, 8(SP)
	MOVQ 72(R11), AX
	MOVQ AX, 16(SP)
	MOVQ 80(R11), AX
	MOVQ AX, 24(SP)
	MOVQ 88(R11), AX
	MOVQ AX, 32(SP)
	MOVQ 96(R11), AX
	MOVQ AX, 40(SP)
	MOVQ 104(R11), AX
	MOVQ AX, 48(SP)
	MOVQ 112(R11), AX
	MOVQ AX, 56(SP)
	MOVQ 8(R11), DI   // arguments 0 to 5
	MOVQ 16(R11), SI
	MOVQ 24(R11), DX
	MOVQ 32(R11), CX
	MOVQ 40(R11), R8
	MOVQ 48(R11), R9
	MOVQ 0(R11), R10
	XORL AX, AX       // no vector registers are used
	CALL R10
	MOVQ 72(SP), DI
	MOVQ AX, 120(DI)
	XORL AX, AX
	RET

// func trampoline() unsafe.Pointer
TEXT ·trampoline(SB), NOSPLIT, $0-8
	LEAQ unpack<>(SB), AX
	MOVQ AX, ret+0(FP)
	RET
