// Split-K: partial sums of CTAs that share a tile, handed over in a workspace in memory. A sum is MISSING, the workspace's
// sentinel, until it is there: so no counter and no barrier says that it is.

#include "numeric.cuh"

constexpr u32 MISSING = ~0u;  // a NaN that no sum is: those of the hardware are 0x7fffffff
__device__ __forceinline__ float4 load_sums(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_sums(float4* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ bool is_missing(float4 v) {
  return __float_as_uint(v.x) == MISSING || __float_as_uint(v.y) == MISSING || __float_as_uint(v.z) == MISSING ||
         __float_as_uint(v.w) == MISSING;
}
