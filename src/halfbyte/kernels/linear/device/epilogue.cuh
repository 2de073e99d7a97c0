// From sums to y: y[m, n] = sum * unit + bias[n], each step rounded by itself in fp32, and then once to the type of x.
// unit is one over the factor that the codebook comes multiplied by. bias may be null.
//
// With W as the A operand a lane's sums are of two rows of W, neighbours in y: see device/mma.cuh.

#include "numeric.cuh"

__device__ __forceinline__ float scale_and_add(float sum, float unit, float bias) {
  return __fadd_rn(__fmul_rn(sum, unit), bias);
}
// A word of two neighbours of a row of y. even: the row has an even number of them; both: the second exists.
__device__ __forceinline__ u32 load_two(const u16* from, bool even, bool both) {
  if (even) return *reinterpret_cast<const u32*>(from);
  return from[0] | (both ? u32(from[1]) << 16 : 0);
}

// Where `wanted`, by a predicate. Behind a branch of its own each of a tile's results would be computed when the one
// before it has been stored, and would wait for all of its own steps; so they are computed side by side.
__device__ __forceinline__ void store_if(bool wanted, u16* to, u32 value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u16 [%1], %2;}" ::"r"(u32(wanted)), "l"(to),
               "h"(u16(value)));
}
__device__ __forceinline__ void store_if(bool wanted, u32* to, u32 value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u32 [%1], %2;}" ::"r"(u32(wanted)), "l"(to),
               "r"(value));
}
__device__ __forceinline__ void store_if(bool wanted, float* to, float value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.f32 [%1], %2;}" ::"r"(u32(wanted)), "l"(to),
               "f"(value));
}
__device__ __forceinline__ void store_if(bool wanted, float2* to, float2 value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3};}" ::"r"(u32(wanted)), "l"(to),
               "f"(value.x), "f"(value.y));
}
__device__ __forceinline__ void store_if(bool wanted, uint2* to, uint2 value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.u32 [%1], {%2, %3};}" ::"r"(u32(wanted)), "l"(to),
               "r"(value.x), "r"(value.y));
}
__device__ __forceinline__ void store_if(bool wanted, uint4* to, uint4 value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.u32 [%1], {%2, %3, %4, %5};}" ::"r"(u32(wanted)),
               "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
}
__device__ __forceinline__ void store_if(bool wanted, float4* to, float4 value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.f32 [%1], {%2, %3, %4, %5};}" ::"r"(u32(wanted)),
               "l"(to), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w));
}
// Else 0.
__device__ __forceinline__ u32 load_if(bool wanted, const u32* from) {
  u32 value = 0;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.u32 %0, [%2];}"
               : "+r"(value)
               : "r"(u32(wanted)), "l"(from));
  return value;
}
__device__ __forceinline__ u32 load_if(bool wanted, const u16* from) {
  u16 value = 0;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.u16 %0, [%2];}"
               : "+h"(value)
               : "r"(u32(wanted)), "l"(from));
  return value;
}
// Two neighbours of a row, which has an even number of them if Even; else `both` says whether the second exists.
template <bool Even> __device__ __forceinline__ void store_two_if(bool wanted, u16* to, float2 value, bool both) {
  const u32 word = pack(value.x, value.y);
  if constexpr (Even) store_if(wanted, reinterpret_cast<u32*>(to), word);
  else store_if(wanted, to, word & 0xffff), store_if(wanted && both, to + 1, word >> 16);
}
template <bool Even> __device__ __forceinline__ void store_two_if(bool wanted, float* to, float2 value, bool both) {
  if constexpr (Even) store_if(wanted, reinterpret_cast<float2*>(to), value);
  else store_if(wanted, to, value.x), store_if(wanted && both, to + 1, value.y);
}
template <bool Even> __device__ __forceinline__ u32 load_two_if(bool wanted, const u16* from, bool both) {
  if constexpr (Even) return load_if(wanted, reinterpret_cast<const u32*>(from));
  return load_if(wanted, from) | load_if(wanted && both, from + 1) << 16;
}
// v / (1 + exp(-t)), each step to two or three last places. What is too small for a normal number counts as 0, which
// changes nothing here, and costs no instructions.
__device__ __forceinline__ float exponential(float t) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(t * 1.4426950408889634f));
  return result;
}
__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
__device__ __forceinline__ float times_sigmoid(float v, float t) { return v * reciprocal(1 + exponential(-t)); }
// What gates, in fp32. silu(v) = v * sigmoid(v), and gelu's approximation by tanh is v * sigmoid(2 u), where
// u = sqrt(2 / pi) (v + 0.044715 v^3).
template <Activation KIND> __device__ __forceinline__ float activated(float v) {
  if constexpr (KIND == Activation::gelu) return 0.5f * v * (1 + erff(v * 0.70710678118654752f));
  return times_sigmoid(v, KIND == Activation::silu ? v : 1.5957691216057308f * fmaf(0.044715f * v, v * v, v));
}
// activation(gate) * up; gpt-oss clamps both, and adds one to up.
template <Activation KIND> __device__ __forceinline__ float gated(float gate, float up) {
  if constexpr (KIND == Activation::swiglu_oai) {
    gate = fminf(gate, 7.0f), up = fminf(fmaxf(up, -7.0f), 7.0f);
    return (up + 1) * times_sigmoid(gate, 1.702f * gate);
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
