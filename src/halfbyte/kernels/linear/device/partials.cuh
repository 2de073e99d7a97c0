// A workspace in memory, through which CTAs give each other sums. Each number of it is a SENTINEL until the sum is
// there, so no counter and no barrier says that it is: who needs it looks again. The next launch clears what is left,
// see Workspace in workspace.py.

#include "ptx.cuh"

constexpr u32 SENTINEL = ~0u;  // a NaN that no sum is: those of the hardware are 0x7fffffff
__device__ __forceinline__ float4 load_partial(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_partial(const float2* from) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_partial(float4* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_partial(float2* to, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ bool is_missing(float2 v) {
  return __float_as_uint(v.x) == SENTINEL || __float_as_uint(v.y) == SENTINEL;
}
__device__ __forceinline__ bool is_missing(float4 v) {
  return __float_as_uint(v.x) == SENTINEL || __float_as_uint(v.y) == SENTINEL || __float_as_uint(v.z) == SENTINEL ||
         __float_as_uint(v.w) == SENTINEL;
}

// Makes room for the next launch: what the one before has left, by this thread of so many.
template <class Arguments> __device__ __forceinline__ void clear_stale(const Arguments& a, u32 thread, u32 threads) {
  for (u32 i = thread; i < a.stale_count; i += threads) {
    const float missing = __uint_as_float(SENTINEL);
    a.stale[i] = make_float4(missing, missing, missing, missing);
  }
}
// By all threads of a grid without height.
template <u32 Threads, class Arguments> __device__ __forceinline__ void clear_stale(const Arguments& a) {
  clear_stale(a, blockIdx.x * Threads + threadIdx.x, gridDim.x * Threads);
}
