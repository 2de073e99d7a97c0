// What the bytes of a scale stand for, by SCALE_TYPE.
//
// A nested scale is a byte q: code[q] * absmax + offset, a rounded multiply and then a rounded add, never fused, as
// bitsandbytes has it; 256 scales of W share an absmax.

#include "numeric.cuh"

constexpr bool NESTED = SCALE_TYPE == TYPE_NESTED;
constexpr int SCALE_SIZE = NESTED ? 1 : SCALE_TYPE == TYPE_FP32 ? 4 : 2;  // bytes
#if SCALE_TYPE == TYPE_NESTED
typedef u8 StoredScale, ScaleBits;
#elif SCALE_TYPE == TYPE_FP32
typedef float StoredScale;
typedef u32 ScaleBits;
#else
typedef u16 StoredScale, ScaleBits;
#endif

// The value of a scale that is a number itself. Bits beyond the scale's own are not looked at.
__device__ __forceinline__ float decode_flat(u32 bits) {
  return SCALE_TYPE == TYPE_FP32 ? __uint_as_float(bits) : SCALE_TYPE == TYPE_FP16 ? from_fp16(bits) : from_bf16(bits);
}
__device__ __forceinline__ float decode_stored(StoredScale scale) {
#if SCALE_TYPE == TYPE_FP32
  return scale;
#else
  return decode_flat(scale);
#endif
}
__device__ __forceinline__ float decode_nested(float code, float absmax, float offset) {
  return __fadd_rn(__fmul_rn(code, absmax), offset);
}
