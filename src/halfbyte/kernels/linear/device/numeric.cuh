// Numbers: the integers' names, and what 16 bits of an operand stand for.
// Macros: X_TYPE, the type of x, bias and y; SCALE_TYPE, that of W's scales. Both as TYPES in kernels/linear/constants.py
// numbers them.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

#define TYPE_FP32 0
#define TYPE_FP16 1
#define TYPE_BF16 2
#define TYPE_NESTED 3  // of scales: a byte, which is a number of a code times a scale of its own, plus an offset

constexpr bool FP16 = X_TYPE == TYPE_FP16;

__device__ __forceinline__ float from_fp16(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
  return value;
}
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
// A number of x or bias, where these have 16 bits.
__device__ __forceinline__ float unpack(u32 bits) { return FP16 ? from_fp16(bits) : from_bf16(bits); }
// Rounded to the type of x.
__device__ __forceinline__ u16 narrow(float value) {
  u16 bits;
#if X_TYPE == TYPE_FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#elif X_TYPE == TYPE_BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
  return bits;
}
// Two fp32 numbers, rounded, the first in the low half. Needs sm_80.
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
#if X_TYPE == TYPE_FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#elif X_TYPE == TYPE_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
  return word;
}
