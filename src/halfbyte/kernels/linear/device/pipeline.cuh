// A pipeline of buffers in shared memory: full and empty barriers, the copies that end at them, and a position in the
// ring. A producer waits for `empty`, a consumer for `full`. Needs sm_90.

#include "ptx.cuh"

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// After which all may use barriers that were made.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// In another CTA of the cluster, which may write now what this thread has read. What the thread has written is not told
// to it: that would wait until all of it is in global memory, 0.3 us and more.
__device__ __forceinline__ void give_back_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// What is read once leaves L2 first, and all else may stay there: what a step reads again, or the next one.
__device__ __forceinline__ u64 leaving_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 staying() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The same copy as `copy`, which stays in L2 as `policy` says.
__device__ __forceinline__ void copy_as(u64 policy, u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// The box at {x, y} of an array of two dimensions, by its tensor map.
__device__ __forceinline__ void copy_box(u32 to, u64 map, u32 x, u32 y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// `copy` and `copy_box` to the same place in all CTAs of the cluster whose bits are in `ctas`, each of which has the
// bytes counted at its own barrier there.
__device__ __forceinline__ void copy_to_all(u32 ctas, u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(u16(ctas))
      : "memory");
}
__device__ __forceinline__ void copy_box_to_all(u32 ctas, u32 to, u64 map, u32 x, u32 y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(u16(ctas))
      : "memory");
}
// The same, which stays in L2 as `policy` says.
__device__ __forceinline__ void copy_box_as(u64 policy, u32 to, u64 map, u32 x, u32 y, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}
// Asks L2 for a box.
__device__ __forceinline__ void prefetch_box(u64 map, u32 x, u32 y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void prefetch_box(u64 map, u32 x, u32 y, u32 z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}
// From own shared memory to that of another CTA of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void copy_to_other(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Numbers for a CTA of the cluster, and its barrier.
__device__ __forceinline__ void send_sum(u32 to, float sum, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(sum),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send_pair(u32 to, float2 pair, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(pair.x), "f"(pair.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send_sums(u32 to, float4 sums, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(sums.x), "f"(sums.y), "f"(sums.z), "f"(sums.w), "r"(barrier)
               : "memory");
}

struct Ring {  // a position in a ring of `size` buffers, and the parity of its barriers there
  u32 at = 0, parity;
  __device__ explicit Ring(u32 parity) : parity(parity) {}
  __device__ void next(u32 size) {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(u32 buffers, u32 size) {  // so many, no more than `size`
    at += buffers;
    if (at < size) return;
    at -= size;
    parity ^= 1;
  }
};
