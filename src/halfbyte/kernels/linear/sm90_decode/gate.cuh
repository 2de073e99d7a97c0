// What gates: activation(gate) * up, in fp32.

#include "work.cuh"

// silu(v) = v * sigmoid(v), and gelu's approximation by tanh is v * sigmoid(2 u) with u = sqrt(2 / pi) (v + 0.044715 v^3).
__device__ __forceinline__ float activation(float v) {
  const float twice = Config::activation == Activation::silu ? v : 1.5957691216057308f * fmaf(0.044715f * v, v * v, v);
  return __fdividef(v, 1 + __expf(-twice));
}
__device__ __forceinline__ float4 gated(float4 gate, float4 up) {
  return make_float4(activation(gate.x) * up.x, activation(gate.y) * up.y, activation(gate.z) * up.z,
                     activation(gate.w) * up.w);
}
