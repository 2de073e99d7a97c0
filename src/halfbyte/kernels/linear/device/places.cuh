// Places of pairs among those of their experts. A warp has N times 32 pairs, of which a lane has one each time. alike:
// the lanes that have the same expert then, by __match_any_sync.

#include "numeric.cuh"

// Adds `number` to a word, for a lane that wants it, and gives what was there. By a predicate, so that many are under
// way at once.
__device__ __forceinline__ u32 take_places(u32 address, u32 number, bool wants) {
  u32 before;
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p atom.shared.add.u32 %0, [%1], %2;}"
               : "=r"(before)
               : "r"(address), "r"(number), "r"(u32(wants))
               : "memory");
  return before;
}
// Counts pairs at `start`, where each expert has a word, in the order of pairs. One lane does it for all that are
// alike, so no order of additions changes a count. first: what there was before them. By all lanes of a warp.
template <u32 N>
__device__ __forceinline__ void count_pairs_of(u32 (&first)[N], u32 start, const u32 (&expert)[N],
                                               const u32 (&alike)[N], u32 nobody, u32 lane) {
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    const bool leads = expert[i] != nobody && __ffs(alike[i]) == lane + 1;
    first[i] = take_places(start + 4 * expert[i], __popc(alike[i]), leads);
    __syncwarp();
  }
}
// Then the place of a lane's pair, if it has an expert. By all lanes.
__device__ __forceinline__ u32 place_among(u32 first, u32 alike, u32 lane) {
  return __shfl_sync(~0u, first, __ffs(alike) - 1) + __popc(alike & (1u << lane) - 1);
}
