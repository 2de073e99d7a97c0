// Pairs of a token and an expert, sorted by expert, and the tiles that follow: what the products of many pairs go by
// (linear/device/grouped.cuh draws `routes`).
//
// Bytes: the ids twice, and two numbers for each pair. One CTA does it all in a few microseconds, so nothing waits for
// another CTA or for the host. Each warp has a run of pairs. It counts those of each expert; a thread an expert adds up
// what the warps have counted; then each warp knows where its pairs go. Pairs of an expert keep their order, so the
// same ids give the same routes. Ids that are no expert are nobody's, and their place is NOWHERE.
//
// Config: tile_m, rows of a tile; x, which is not looked at.

#include "linear/device/ptx.cuh"

constexpr u32 WARPS = 32, THREADS = 32 * WARPS, NOWHERE = ~0u;
constexpr u32 AT_ONCE = 4;  // ids that a lane loads ahead

struct Arguments {
  const void* ids;  // [pairs], of 32 bits or 64
  uint4* routes;    // behind which, at a multiple of 16 bytes, is the place of each pair among the sorted ones
  u32 pairs, experts, wide_ids, most_tiles;
};

extern __shared__ u32 counts[];  // [WARPS][experts]

// The sum of `value` over the threads before this one, and over all of them.
struct Sums {
  u32 before, all;
};
__device__ __forceinline__ Sums add_up(u32 value, u32* of_warps, u32 warp, u32 lane) {
  const auto scan = [&](u32 until) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += other;
    }
    return until;
  };
  const u32 until = scan(value);
  if (lane == 31) of_warps[warp] = until;
  __syncthreads();
  const u32 warps = scan(of_warps[lane]);
  const u32 earlier = __shfl_sync(~0u, warps, (warp + 31) % 32), all = __shfl_sync(~0u, warps, 31);
  __syncthreads();
  return {(warp ? earlier : 0) + until - value, all};
}

// Calls `each` with the pairs of a warp, 32 at a time: the lane's pair, its expert or NOWHERE, the lanes with the same
// expert. All lanes call it.
template <class Each>
__device__ __forceinline__ void for_each_pair(const Arguments& a, u32 warp, u32 lane, const Each& each) {
  const u32 run = (a.pairs + THREADS - 1) / THREADS * 32, end = min((warp + 1) * run, a.pairs);
  for (u32 first = warp * run; first < end; first += 32 * AT_ONCE) {
    u64 ids[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 pair = first + 32 * i + lane;
      ids[i] = ~0ull;
      if (pair < end)
        ids[i] = a.wide_ids ? static_cast<const u64*>(a.ids)[pair] : u64(static_cast<const u32*>(a.ids)[pair]);
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 expert = ids[i] < a.experts ? u32(ids[i]) : NOWHERE;
      each(first + 32 * i + lane, end, expert, __match_any_sync(~0u, expert));
      __syncwarp();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_pairs(const __grid_constant__ Arguments a) {
  __shared__ u32 of_warps[WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = (1u << lane) - 1;
  u32* own = counts + warp * a.experts;
  for (u32 e = lane; e < a.experts; e += 32) own[e] = 0;
  __syncwarp();
  wait_for_prior_kernel();
  for_each_pair(a, warp, lane, [&](u32, u32, u32 expert, u32 alike) {
    if (expert != NOWHERE && !(alike & before)) own[expert] += __popc(alike);
  });
  __syncthreads();
  // A thread an expert.
  const u32 expert = threadIdx.x;
  u32 rows = 0;
  if (expert < a.experts)
    for (u32 w = 0; w < WARPS; w++) rows += counts[w * a.experts + expert];
  const u32 tiles = (rows + Config::tile_m - 1) / Config::tile_m;
  const Sums of_rows = add_up(rows, of_warps, warp, lane), of_tiles = add_up(tiles, of_warps, warp, lane);
  if (expert < a.experts) {
    u32 place = of_rows.before;
    for (u32 w = 0; w < WARPS; w++) {
      const u32 count = counts[w * a.experts + expert];
      counts[w * a.experts + expert] = place;
      place += count;
    }
  }
  uint4* table = a.routes + 1;
  for (u32 i = 0; i < tiles; i++) {
    const u32 first = i * Config::tile_m;
    table[of_tiles.before + i] = make_uint4(expert, of_rows.before + first, min(u32(Config::tile_m), rows - first), 0);
  }
  for (u32 i = of_tiles.all + threadIdx.x; i < a.most_tiles; i += THREADS) table[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) *a.routes = make_uint4(of_tiles.all, 0, 0, 0);
  __syncthreads();
  u32 *sorted = reinterpret_cast<u32*>(table + a.most_tiles), *places = sorted + (a.pairs + 3) / 4 * 4;
  for_each_pair(a, warp, lane, [&](u32 pair, u32 end, u32 expert, u32 alike) {
    const bool valid = expert != NOWHERE;
    const u32 place = valid ? own[expert] + __popc(alike & before) : NOWHERE;
    __syncwarp();
    if (valid && !(alike & before)) own[expert] += __popc(alike);
    if (valid) sorted[place] = pair;
    if (pair < end) places[pair] = place;
  });
}
