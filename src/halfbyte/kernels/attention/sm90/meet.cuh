// Where sums meet: those of a CTA's warps in its shared memory, then those of a cluster's CTAs in theirs. The order in
// which parts are added up is always the same.

#include "share.cuh"
#include "sums.cuh"

// What each part of a row counts for in what they have together.
template <class At> struct Shares {
  float highest, weights, of[At::PARTS];
  __device__ __forceinline__ Shares(const At& at, u32 tile, u32 row, float sink = NONE) : highest(sink) {
    float2 told[At::PARTS];
#pragma unroll
    for (u32 part = 0; part < At::PARTS; part++) {
      told[part] = at.statistics(tile, part, row);
      highest = fmaxf(highest, told[part].x);
    }
    weights = weight_of(sink, highest);
#pragma unroll
    for (u32 part = 0; part < At::PARTS; part++) {
      of[part] = weight_of(told[part].x, highest);
      weights += of[part] * told[part].y;
    }
  }
  __device__ __forceinline__ float2 total(const At& at, u32 slot, u32 tile, u32 lane) const {
    float2 sum = {0, 0};
#pragma unroll
    for (u32 part = 0; part < At::PARTS; part++) {
      const float2 found = at.pair(slot, tile, part, lane);
      sum.x += of[part] * found.x, sum.y += of[part] * found.y;
    }
    return sum;
  }
};
// The score of a row that has no value, or NONE.
__device__ __forceinline__ float sink_of(const Arguments& a, const Part& own, u32 row) {
  const u32 head = own.head * Config::group + min(row, ROWS - 1) / NEW;
  if constexpr (Config::sinks == 1) return LOG2E * unpack(__ldg(static_cast<const u16*>(a.sinks) + head));
  if constexpr (Config::sinks == 2) return LOG2E * __ldg(static_cast<const float*>(a.sinks) + head);
  return NONE;
}
// Those of a lane's rows. They come from far away, and are asked for before sums meet.
struct Sinks {
  float of[COLUMNS][2];
  __device__ __forceinline__ Sinks(const Arguments& a, const Part& own, u32 tile, u32 lane) {
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) of[column][i] = sink_of(a, own, (tile * COLUMNS + column) * 8 + 2 * (lane % 4) + i);
  }
};
// A warp's own, to where the CTA's meet.
__device__ __forceinline__ void leave(const Sums& sums, u32 tile, u32 part, u32 lane) {
#pragma unroll
  for (u32 column = 0; column < COLUMNS; column++) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      float all = sums.weights[column][i];
      all += __shfl_xor_sync(~0u, all, 4);
      all += __shfl_xor_sync(~0u, all, 8);
      all += __shfl_xor_sync(~0u, all, 16);
      const u32 row = 8 * column + 2 * (lane % 4) + i;
      if (lane < 4) OfWarps::own(OfWarps::statistics_at(tile, part, row)) = make_float2(sums.highest[column][i], all);
    }
#pragma unroll
    for (u32 n = 0; n < SUM_TILES; n++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        const auto& pair = sums.of[column];
        OfWarps::own(OfWarps::pair_at((column * SUM_TILES + n) * 2 + i, tile, part, lane)) =
            make_float2(pair[n / 2 * 2][n % 2 * 2 + i], pair[n / 2 * 2 + 1][n % 2 * 2 + i]);
      }
  }
}
// Every row of a tile, with the pairs of it that one of the tile's warps takes: `of_row` says what to do with each.
template <class OfRow> __device__ __forceinline__ void for_each_row(u32 tile, u32 warp, u32 lane, const OfRow& of_row) {
#pragma unroll
  for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 of_tile = 8 * column + 2 * (lane % 4) + i;
      if (tile * 8 * COLUMNS + of_tile >= ROWS) continue;
      const auto of_pair = of_row(of_tile, column, i);
#pragma unroll
      for (u32 first = 0; first < SUM_TILES; first += TOKEN_WARPS)
        if (first + warp < SUM_TILES) of_pair((column * SUM_TILES + first + warp) * 2 + i);
    }
}
// To the CTAs of a cluster: pairs to those that add them up, and to all of them what weighs a part. Nobody meets behind
// that: what a CTA is sent is counted at its own barrier, and when all of it is there, nothing more will come.
struct ToCluster {
  u32 rank;
  // Makes known how much is to come, by a warp, before CTAs meet.
  __device__ __forceinline__ void await(u32 lane) const {
    u32 pairs = 0;
    for (u32 row = lane; row < ROWS; row += 32)
#pragma unroll
      for (u32 n = 0; n < SUM_TILES; n++)
        pairs += ((row / 8 % COLUMNS * SUM_TILES + n) * 2 + row % 2) % CLUSTER == rank ? 8 : 0;
    pairs = __reduce_add_sync(~0u, pairs);
    if (lane == 0) {
      init(address_of(SENT), 1);
      publish_barriers();
      expect(address_of(SENT), CLUSTER * 8 * (ROWS + pairs));
    }
    __syncwarp();
  }
  __device__ __forceinline__ void send(u32 place, u32 to, float2 pair) const {
    send_pair(address_in(address_of(place), to), pair, address_in(address_of(SENT), to));
  }
  __device__ __forceinline__ void tell(u32 tile, u32 row, u32 lane, float2 told) const {
#pragma unroll
    for (u32 other = lane / 4; other < CLUSTER; other += 8)
      send(OfCluster::statistics_at(tile, rank, row), other, told);
  }
  __device__ __forceinline__ void give(u32 tile, u32 number, u32 lane, float2 sum) const {
    send(OfCluster::pair_at(number / CLUSTER, tile, rank, lane), number % CLUSTER, sum);
  }
};
// What a CTA's warps have together, to where CTAs meet.
template <class To> __device__ __forceinline__ void pass_on(const To& to, u32 tile, u32 warp, u32 lane) {
  const OfWarps here;
  for_each_row(tile, warp, lane, [&](u32 row, u32 column, u32 i) {
    const Shares<OfWarps> shares(here, tile, row);
    if ((column * 2 + i) % TOKEN_WARPS == warp) to.tell(tile, row, lane, make_float2(shares.highest, shares.weights));
    return [=, &here, &to](u32 number) { to.give(tile, number, lane, shares.total(here, number, tile, lane)); };
  });
}
// The result: the two numbers of a row that a lane of this group has in a tile of sums.
__device__ __forceinline__ void store_result(const Arguments& a, const Part& own, u32 row, u32 tile, u32 group,
                                             float2 sum, float weights) {
  const u32 head = own.head * Config::group + row / NEW;
  const u32 of = tile / 2 * 2 + tile % 2 * SUM_TILES;
  u16* out = a.out + ((u64(own.which) * NEW + row % NEW) * a.heads * Config::group + head) * SIZE;
  const float all = fmaxf(weights, 1.f);  // the highest score's weight alone is 1
  *reinterpret_cast<u32*>(out + 64 * (of / 8) + 8 * group + of % 8) = pack(sum.x / all, sum.y / all);
}
// Of pairs that several CTAs add up, those whose number is `rank`, each of which parts have in a slot.
template <class At>
__device__ __forceinline__ void add_up(const Arguments& a, const At& at, u32 tile, u32 warp, u32 rank, const Part& own,
                                       const Sinks& sinks, u32 lane) {
  for_each_row(tile, warp, lane, [&](u32 of_tile, u32 column, u32 i) {
    const Shares<At> shares(at, tile, of_tile, sinks.of[column][i]);
    const u32 row = tile * 8 * COLUMNS + of_tile;
    return [=, &a, &at, &own](u32 number) {
      if (number % At::ADDED_BY != rank) return;
      const float2 sum = shares.total(at, number / At::ADDED_BY, tile, lane);
      store_result(a, own, row, number / 2 % SUM_TILES, lane / 4, sum, shares.weights);
    };
  });
}
