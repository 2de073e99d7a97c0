// What the bytes of a scale stand for, by Config::scale, and the two ways to apply it.
//
//   promote  after the MMA: fp32 sums of a span times the span's scale, in fp32. Nothing is rounded to 16 bits, but it
//            takes a multiply-add for each sum and span, so spans should be long
//   fold     before the MMA: two 16-bit weights times their scale, rounded to 16 bits, which is the dequantized weight
//            itself where the codebook is exact. It takes one multiply for two weights, however short a span is
//
// A nested scale is a byte q: code[q] * absmax + offset, a rounded multiply and then a rounded add, never fused, as
// bitsandbytes has it; 256 scales of W share an absmax.

#include "numeric.cuh"

constexpr bool NESTED = Config::scale == Type::nested;
constexpr bool EXPONENTS = Config::scale == Type::e8m0;  // one for 32 weights, two bytes for a block of 64
constexpr int SCALE_SIZE = NESTED ? 1 : Config::scale == Type::fp32 ? 4 : 2;  // bytes

// Stored: as it lies in memory. Bits: an integer of its size.
template <Type> struct ScaleTypes {
  typedef u16 Stored, Bits;
};
template <> struct ScaleTypes<Type::nested> {
  typedef u8 Stored, Bits;
};
template <> struct ScaleTypes<Type::e8m0> {
  typedef u8 Stored, Bits;
};
template <> struct ScaleTypes<Type::fp32> {
  typedef float Stored;
  typedef u32 Bits;
};
typedef ScaleTypes<Config::scale>::Stored StoredScale;
typedef ScaleTypes<Config::scale>::Bits ScaleBits;

// The value of a scale that is a number itself. Bits beyond the scale's own are not looked at.
__device__ __forceinline__ float decode_flat(u32 bits) {
  if constexpr (EXPONENTS) {  // 2^(e - 127): of 0 a subnormal number, and NaN of 255
    const u32 e = bits & 255;
    return __uint_as_float(e << 23 | u32((e + 1 & 255) <= 1) << 22);
  }
  return Config::scale == Type::fp32   ? __uint_as_float(bits)
         : Config::scale == Type::fp16 ? from_fp16(bits)
                                       : from_bf16(bits);
}
__device__ __forceinline__ float decode_stored(float scale) { return scale; }
template <class Bits> __device__ __forceinline__ float decode_stored(Bits scale) { return decode_flat(scale); }
__device__ __forceinline__ float decode_nested(float code, float absmax, float offset) {
  return __fadd_rn(__fmul_rn(code, absmax), offset);
}

// Of either kind. absmax, offset: with NESTED, for which the 256 numbers of `code` are in shared memory.
__device__ __forceinline__ float decode_scale(StoredScale stored, float absmax, const unsigned char* code,
                                              float offset) {
  if constexpr (NESTED) return decode_nested(reinterpret_cast<const float*>(code)[u32(stored)], absmax, offset);
  else return decode_stored(stored);
}

// Adds `sum`, the MMA's results of one span, to `total`. upper, lower: the scales of the lane's two rows of W, in the
// order of device/mma.cuh.
template <int Sums>
__device__ __forceinline__ void promote(float (&total)[Sums], const float (&sum)[Sums], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < Sums; i += 4) {
    total[i] += sum[i] * upper;
    total[i + 1] += sum[i + 1] * upper;
    total[i + 2] += sum[i + 2] * lower;
    total[i + 3] += sum[i + 3] * lower;
  }
}
// Two weights of the type of x times `scale`, the same number of that type twice. bf16 needs sm_80.
__device__ __forceinline__ u32 fold(u32 weights, u32 scale) {
  u32 product;
  if constexpr (FP16) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(weights), "r"(scale));
  } else {  // plus -0, which changes nothing: sm_80 has no multiplication alone
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(weights), "r"(scale), "r"(0x80008000));
  }
  return product;
}
