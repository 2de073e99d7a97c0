// Instructions that CUDA C++ has no word for, by themselves: shared memory by its 32-bit address, clusters, and the
// words of programmatic dependent launch. Clusters and dependent launch need sm_90.

#include "numeric.cuh"

__device__ __forceinline__ u32 load_number(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ u32 load_byte(u32 address) {
  u32 value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ u32 load_short(u32 address) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_short(u32 address, u32 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(u16(value)) : "memory");
}
__device__ __forceinline__ float load_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_pair(u32 address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}
__device__ __forceinline__ void store_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ uint2 load_pair(u32 address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_word(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_copies(u32 address, u32 value) {  // four, at a multiple of 16 bytes
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ float4 load_sums(u32 address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}
__device__ __forceinline__ uint4 load_four_words(u32 address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}
__device__ __forceinline__ void store_four_words(u32 address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_sums(u32 address, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z),
               "f"(value.w)
               : "memory");
}

// A meeting of so many threads, of whole warps, and its number among those of a CTA.
template <u32 Number, u32 Threads> __device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory");
}
// What was written to shared memory becomes visible to wgmma and to copies.
__device__ __forceinline__ void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void prefetch_to_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
// The same of bytes, both multiples of 16. Needs sm_90.
__device__ __forceinline__ void prefetch_bytes(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// The two halves of a meeting before which nothing was written that is read behind it. With `sync_cluster` a thread's
// stores to global memory must have arrived, too, which takes 0.3 us and more.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet_cluster() { arrive_cluster(), wait_for_cluster(); }
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

// A warpgroup's threads have so many registers from now on: more, for which it waits, or fewer. Needs sm_90a.
template <int Count> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> __device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Until the kernel before this one in the stream is done, and all that it wrote can be read.
__device__ __forceinline__ void wait_for_prior_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may begin when every CTA of this one has said so, or has ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
