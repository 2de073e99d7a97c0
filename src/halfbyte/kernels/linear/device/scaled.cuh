// A weight in fp32, ahead of its one rounding. Config::flushes: subnormal products become 0, as bitsandbytes has it.

#include "numeric.cuh"

// A number of the codebook times a scale, as dequantize multiplies them.
__device__ __forceinline__ float scaled(float number, float scale) {
  float product;
  if constexpr (Config::flushes) asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(number), "f"(scale));
  else asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(number), "f"(scale));
  return product;
}
