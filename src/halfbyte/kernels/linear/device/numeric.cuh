// Numbers: the integers' names, and what 16 bits of an operand stand for.
//
// Config holds the constants that a variant is compiled with; launch.py beside each kernel.cu writes it. All have `x`,
// the type of x, bias and y, and `scale`, that of W's scales.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

// nested, of scales: a byte, which is a number of a code times a scale of its own, plus an offset.
// e8m0, of scales: a byte e, which stands for 2^(e - 127), and 255 for NaN.
enum class Type { fp32, fp16, bf16, nested, e8m0 };
// What the first of two results is put through before it multiplies the second. swiglu_oai is gpt-oss', see `gated`.
enum class Activation { none, silu, gelu, gelu_tanh, swiglu_oai };

// How nibbles become numbers: by a table, or computed (computed.cuh).
enum class Numbers { looked_up, integers, e2m1 };

// How the scales of a row of W are loaded, see scale_rows.cuh.
enum class Loads { one, unit, vector, across };

#include "config.cuh"

constexpr bool FP16 = Config::x == Type::fp16;

// The same number, but not to the compiler: it keeps it in a register where it would rather compute it anew in every
// turn of a loop, and does not move ahead of the loop what is computed from it.
__device__ __forceinline__ u32 kept(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Makes the first of these loads wait for a word of each, so that all are on their way before any is used. Else the
// compiler spares registers, loads each piece where it is used, and waits for memory as often; nothing but a use keeps
// it from that. zero: is 0, and the compiler does not know.
template <u32 N> __device__ __forceinline__ void load_together(uint4 (&pieces)[N], u32 zero) {
  u32 all = 0;
#pragma unroll
  for (u32 i = 0; i < N; i++) all ^= pieces[i].w;
  pieces[0].x ^= all & zero;
}

__device__ __forceinline__ float from_fp16(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
  return value;
}
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
// A number of x or bias, where these have 16 bits.
__device__ __forceinline__ float unpack(u32 bits) { return FP16 ? from_fp16(bits) : from_bf16(bits); }
// Rounded to the type of x, of 16 bits. bf16 needs sm_80.
__device__ __forceinline__ u16 narrow(float value) {
  u16 bits;
  if constexpr (FP16) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  return bits;
}
// Two fp32 numbers, rounded to the type of x, of 16 bits, the first in the low half. Needs sm_80.
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
  if constexpr (FP16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
}
