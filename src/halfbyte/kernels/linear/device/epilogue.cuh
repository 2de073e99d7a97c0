// From sums to y: y[m, n] = sum * unit + bias[n], each step rounded by itself in fp32, and then once to the type of x.
// unit is one over the factor that the codebook comes multiplied by. bias may be null.
//
// With W as the A operand a lane's sums are of two rows of W, neighbours in y: see device/mma.cuh.

#include "numeric.cuh"

__device__ __forceinline__ float scale_and_add(float sum, float unit, float bias) {
  return __fadd_rn(__fmul_rn(sum, unit), bias);
}
// A word of two neighbours of a row of y. even: the row has an even number of them; both: the second exists.
__device__ __forceinline__ void store_two(u16* to, u32 word, bool even, bool both) {
  if (even) {
    *reinterpret_cast<u32*>(to) = word;
  } else {
    to[0] = u16(word);
    if (both) to[1] = u16(word >> 16);
  }
}
__device__ __forceinline__ u32 load_two(const u16* from, bool even, bool both) {
  if (even) return *reinterpret_cast<const u32*>(from);
  return from[0] | (both ? u32(from[1]) << 16 : 0);
}
// What gates, in fp32. silu(v) = v * sigmoid(v), and gelu's approximation by tanh is v * sigmoid(2 u), where
// u = sqrt(2 / pi) (v + 0.044715 v^3).
template <Activation KIND> __device__ __forceinline__ float activated(float v) {
  if constexpr (KIND == Activation::gelu) return 0.5f * v * (1 + erff(v * 0.70710678118654752f));
  const float twice = KIND == Activation::silu ? v : 1.5957691216057308f * fmaf(0.044715f * v, v * v, v);
  return __fdividef(v, 1 + __expf(-twice));
}
// activation(gate) * up; gpt-oss clamps both, and adds one to up.
template <Activation KIND> __device__ __forceinline__ float gated(float gate, float up) {
  if constexpr (KIND == Activation::swiglu_oai) {
    gate = fminf(gate, 7.0f), up = fminf(fmaxf(up, -7.0f), 7.0f);
    return (up + 1) * __fdividef(gate, 1 + __expf(-1.702f * gate));
  }
  return activated<KIND>(gate) * up;
}
template <Activation KIND> __device__ __forceinline__ float4 gated(float4 gate, float4 up) {
  return make_float4(gated<KIND>(gate.x, up.x), gated<KIND>(gate.y, up.y), gated<KIND>(gate.z, up.z),
                     gated<KIND>(gate.w, up.w));
}
// Four neighbours at a multiple of 8 bytes.
__device__ __forceinline__ void store_four(u16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
}
// The sum of a kernel whose scales have the unit in them already.
__device__ __forceinline__ u16 finish(float sum, const u16* bias, u32 n) {
  return narrow(bias ? sum + unpack(bias[n]) : sum);
}
