//go:build !nogpu

#include "textflag.h"

// void unpack(struct words *w): w in R0. Frame: 48 bytes of stack arguments, the link
// register, w; 96 keeps the stack a multiple of 16.
TEXT unpack<>(SB), NOSPLIT|NOFRAME, $0
	SUB  $96, RSP
	MOVD R30, 80(RSP)
	MOVD R0, 88(RSP)
	MOVD R0, R9
	MOVD 72(R9), R10  // arguments 8 to 13
	MOVD R10, 0(RSP)
	MOVD 80(R9), R10
	MOVD R10, 8(RSP)
	MOVD 88(R9), R10
	MOVD R10, 16(RSP)
	MOVD 96(R9), R10
	MOVD R10, 24(RSP)
	MOVD 104(R9), R10
	MOVD R10, 32(RSP)
	MOVD 112(R9), R10
	MOVD R10, 40(RSP)
	MOVD 8(R9), R0    // arguments 0 to 7
	MOVD 16(R9), R1
	MOVD 24(R9), R2
	MOVD 32(R9), R3
	MOVD 40(R9), R4
	MOVD 48(R9), R5
	MOVD 56(R9), R6
	MOVD 64(R9), R7
	MOVD 0(R9), R10
	CALL (R10)
	MOVD 88(RSP), R9
	MOVD R0, 120(R9)
	MOVD 80(RSP), R30
	ADD  $96, RSP
	MOVD $0, R0
	RET

// func trampoline() unsafe.Pointer
TEXT ·trampoline(SB), NOSPLIT, $0-8
	MOVD $unpack<>(SB), R0
	MOVD R0, ret+0(FP)
	RET
