// Rings of stages in shared memory, filled by asynchronous copies. Needs sm_80.

#include "numeric.cuh"

// 16 bytes on their way to shared memory; zeros where they do not exist, and nothing is read. A load brings more of the
// row to L2, where its next pieces are then found.
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
// The same where a warp copies a whole row, of which nothing is left to bring.
__device__ __forceinline__ void copy_row_async(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// The same of four bytes, that exist.
__device__ __forceinline__ void copy_word_async(u32 to, const u32* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `Open` groups of this thread have arrived.
template <int Open> __device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Open) : "memory");
}

// The hardware starts CTAs in the order of blockIdx, and a CTA waits for CTAs of higher numbers only; so numbers go the
// other way, and whoever is waited for has started.
__device__ __forceinline__ u32 own_number() { return gridDim.x - 1 - blockIdx.x; }
