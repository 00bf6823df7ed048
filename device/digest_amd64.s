#include "textflag.h"

// The inner loop of xxh3: each stripe of 64 bytes is eight sums of 64 bits, to which
// goes the neighbour's word as it is, and the product of the halves of the own word
// under a key. Words and products have accumulators of their own until the end of
// the block of 16 stripes, so that one addition need not wait for the other.

DATA prime32<>+0(SB)/8, $0x000000009e3779b1
GLOBL prime32<>(SB), RODATA|NOPTR, $8

#define STRIPE_AVX512(off, key) \
	VMOVDQU64 off(SI), Z2; \
	VPXORQ    key, Z2, Z3; \
	VPSHUFD   $0x31, Z3, Z4; \
	VPSHUFD   $0x4e, Z2, Z2; \
	VPMULUDQ  Z3, Z4, Z3; \
	VPADDQ    Z2, Z0, Z0; \
	VPADDQ    Z3, Z1, Z1

// func accumulateAVX512(acc *[8]uint64, data unsafe.Pointer, secret *[192]byte, blocks uintptr)
TEXT ·accumulateAVX512(SB), NOSPLIT, $0-32
	MOVQ acc+0(FP), DI
	MOVQ data+8(FP), SI
	MOVQ secret+16(FP), DX
	MOVQ blocks+24(FP), CX

	VMOVDQU64    0(DI), Z0
	VPBROADCASTQ prime32<>(SB), Z31
	VMOVDQU64    0(DX), Z8
	VMOVDQU64    8(DX), Z9
	VMOVDQU64    16(DX), Z10
	VMOVDQU64    24(DX), Z11
	VMOVDQU64    32(DX), Z12
	VMOVDQU64    40(DX), Z13
	VMOVDQU64    48(DX), Z14
	VMOVDQU64    56(DX), Z15
	VMOVDQU64    64(DX), Z16
	VMOVDQU64    72(DX), Z17
	VMOVDQU64    80(DX), Z18
	VMOVDQU64    88(DX), Z19
	VMOVDQU64    96(DX), Z20
	VMOVDQU64    104(DX), Z21
	VMOVDQU64    112(DX), Z22
	VMOVDQU64    120(DX), Z23
	VMOVDQU64    128(DX), Z24

block:
	VPXORQ Z1, Z1, Z1
	STRIPE_AVX512(0, Z8)
	STRIPE_AVX512(64, Z9)
	STRIPE_AVX512(128, Z10)
	STRIPE_AVX512(192, Z11)
	STRIPE_AVX512(256, Z12)
	STRIPE_AVX512(320, Z13)
	STRIPE_AVX512(384, Z14)
	STRIPE_AVX512(448, Z15)
	STRIPE_AVX512(512, Z16)
	STRIPE_AVX512(576, Z17)
	STRIPE_AVX512(640, Z18)
	STRIPE_AVX512(704, Z19)
	STRIPE_AVX512(768, Z20)
	STRIPE_AVX512(832, Z21)
	STRIPE_AVX512(896, Z22)
	STRIPE_AVX512(960, Z23)
	VPADDQ   Z1, Z0, Z0

	// Scramble.
	VPSRLQ   $47, Z0, Z1
	VPXORQ   Z1, Z0, Z0
	VPXORQ   Z24, Z0, Z0
	VPSRLQ   $32, Z0, Z1
	VPMULUDQ Z31, Z0, Z0
	VPMULUDQ Z31, Z1, Z1
	VPSLLQ   $32, Z1, Z1
	VPADDQ   Z1, Z0, Z0

	ADDQ $1024, SI
	DECQ CX
	JNZ  block

	VMOVDQU64 Z0, 0(DI)
	VZEROUPPER
	RET

#define HALF_AVX2(off, key, words, products) \
	VMOVDQU  off(SI), Y4; \
	VPXOR    key(DX), Y4, Y5; \
	VPSHUFD  $0x31, Y5, Y6; \
	VPSHUFD  $0x4e, Y4, Y4; \
	VPMULUDQ Y5, Y6, Y5; \
	VPADDQ   Y4, words, words; \
	VPADDQ   Y5, products, products

#define STRIPE_AVX2(off, key) \
	HALF_AVX2(off, key, Y0, Y2); \
	HALF_AVX2(off+32, key+32, Y1, Y3)

#define SCRAMBLE_AVX2(key, words, products) \
	VPADDQ   products, words, words; \
	VPSRLQ   $47, words, Y4; \
	VPXOR    Y4, words, words; \
	VPXOR    key(DX), words, words; \
	VPSRLQ   $32, words, Y4; \
	VPMULUDQ Y15, words, words; \
	VPMULUDQ Y15, Y4, Y4; \
	VPSLLQ   $32, Y4, Y4; \
	VPADDQ   Y4, words, words

// func accumulateAVX2(acc *[8]uint64, data unsafe.Pointer, secret *[192]byte, blocks uintptr)
TEXT ·accumulateAVX2(SB), NOSPLIT, $0-32
	MOVQ acc+0(FP), DI
	MOVQ data+8(FP), SI
	MOVQ secret+16(FP), DX
	MOVQ blocks+24(FP), CX

	VMOVDQU      0(DI), Y0
	VMOVDQU      32(DI), Y1
	VPBROADCASTQ prime32<>(SB), Y15

block:
	VPXOR Y2, Y2, Y2
	VPXOR Y3, Y3, Y3
	STRIPE_AVX2(0, 0)
	STRIPE_AVX2(64, 8)
	STRIPE_AVX2(128, 16)
	STRIPE_AVX2(192, 24)
	STRIPE_AVX2(256, 32)
	STRIPE_AVX2(320, 40)
	STRIPE_AVX2(384, 48)
	STRIPE_AVX2(448, 56)
	STRIPE_AVX2(512, 64)
	STRIPE_AVX2(576, 72)
	STRIPE_AVX2(640, 80)
	STRIPE_AVX2(704, 88)
	STRIPE_AVX2(768, 96)
	STRIPE_AVX2(832, 104)
	STRIPE_AVX2(896, 112)
	STRIPE_AVX2(960, 120)
	SCRAMBLE_AVX2(128, Y0, Y2)
	SCRAMBLE_AVX2(160, Y1, Y3)

	ADDQ $1024, SI
	DECQ CX
	JNZ  block

	VMOVDQU Y0, 0(DI)
	VMOVDQU Y1, 32(DI)
	VZEROUPPER
	RET
