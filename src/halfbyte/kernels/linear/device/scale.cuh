// What the bytes of a scale stand for, by Config::scale.
//
// A nested scale is a byte q: code[q] * absmax + offset, a rounded multiply and then a rounded add, never fused, as
// bitsandbytes has it; 256 scales of W share an absmax.

#include "numeric.cuh"

constexpr bool NESTED = Config::scale == Type::nested;
constexpr int SCALE_SIZE = NESTED ? 1 : Config::scale == Type::fp32 ? 4 : 2;  // bytes

// Stored: as it lies in memory. Bits: an integer of its size.
template <Type> struct ScaleTypes {
  typedef u16 Stored, Bits;
};
template <> struct ScaleTypes<Type::nested> {
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
  return Config::scale == Type::fp32   ? __uint_as_float(bits)
         : Config::scale == Type::fp16 ? from_fp16(bits)
                                       : from_bf16(bits);
}
__device__ __forceinline__ float decode_stored(float scale) { return scale; }
template <class Bits> __device__ __forceinline__ float decode_stored(Bits scale) { return decode_flat(scale); }
__device__ __forceinline__ float decode_nested(float code, float absmax, float offset) {
  return __fadd_rn(__fmul_rn(code, absmax), offset);
}
