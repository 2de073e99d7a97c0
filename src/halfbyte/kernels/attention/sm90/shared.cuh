// What is where in shared memory: keys and values of new tokens, and behind them sums that meet, which lie where halves
// of blocks have been.
//
// A lane has PAIRS pairs of neighbouring sums. Number (column * SUM_TILES + n) * 2 + i has row 2 member + i of a column
// of eight rows.

#include "work.cuh"

// So many parts have pairs of sums, lane by lane, and of each row the highest score and the sum of weights, which so
// many CTAs add up. In shared memory, from byte `At` on.
template <u32 At, u32 Slots, u32 Parts, u32 AddedBy> struct Meeting {
  static constexpr u32 PARTS = Parts, ADDED_BY = AddedBy, STATISTICS = At + Slots * ROW_TILES * Parts * 256;
  static constexpr u32 END = STATISTICS + ROW_TILES * Parts * COLUMNS * 64;
  __device__ static u32 pair_at(u32 slot, u32 tile, u32 part, u32 lane) {
    return At + (((slot * ROW_TILES + tile) * Parts + part) * 32 + lane) * 8;
  }
  __device__ static u32 statistics_at(u32 tile, u32 part, u32 row) {
    return STATISTICS + ((tile * Parts + part) * 8 * COLUMNS + row) * 8;
  }
  __device__ static float2& own(u32 place) { return *reinterpret_cast<float2*>(memory + place); }
  __device__ float2 pair(u32 slot, u32 tile, u32 part, u32 lane) const { return own(pair_at(slot, tile, part, lane)); }
  __device__ float2 statistics(u32 tile, u32 part, u32 row) const { return own(statistics_at(tile, part, row)); }
};
// Behind the new tokens' keys and values: that of a CTA's warps, where halves of blocks have waited (waiting.cuh), then
// that of the cluster's CTAs.
constexpr u32 BEHIND_NEW = Config::puts ? 4 * ROW_TILES * NEW * SIZE : 0;
using OfWarps = Meeting<BEHIND_NEW, PAIRS, TOKEN_WARPS, 1>;
constexpr u32 BEHIND_HALVES = BEHIND_NEW + WARPS * HALVES * HALF_BYTES;
constexpr u32 BEHIND_WARPS = OfWarps::END > BEHIND_HALVES ? OfWarps::END : BEHIND_HALVES;
using OfCluster = Meeting<BEHIND_WARPS, SLOTS, CLUSTER, CLUSTER>;
// The barrier at which those come that a CTA of a cluster is sent.
constexpr u32 SENT = OfCluster::END;
static_assert((CLUSTER > 1 ? SENT + 16 : BEHIND_WARPS) == Config::shared_bytes, "launch.py asks for as much");
__device__ __forceinline__ u32 address_of(u32 place) { return u32(__cvta_generic_to_shared(memory)) + place; }
