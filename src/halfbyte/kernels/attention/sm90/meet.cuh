// Where sums meet: those of a CTA's warps in its shared memory, then those of CTAs that share a head of keys.
//
// A lane has PAIRS pairs of neighbouring sums. Number (column * SUM_TILES + n) * 2 + i has row 2 member + i of a column
// of eight rows. The order in which parts are added up is always the same.

#include "share.cuh"
#include "sums.cuh"

// So many parts have pairs of sums, lane by lane, and of each row the highest score and the sum of weights, which so
// many CTAs add up. In shared memory, from byte `At` on.
template <u32 At, u32 Slots, u32 Parts, u32 AddedBy> struct Meeting {
  static constexpr bool HAS_ALL = true, IN_MEMORY = false;
  static constexpr u32 PARTS = Parts, ADDED_BY = AddedBy, STATISTICS = At + Slots * ROW_TILES * Parts * 256;
  static constexpr u32 END = STATISTICS + ROW_TILES * Parts * COLUMNS * 64;
  __device__ static u32 pair_at(u32 slot, u32 tile, u32 part, u32 lane) {
    return At + (((slot * ROW_TILES + tile) * Parts + part) * 32 + lane) * 8;
  }
  __device__ static u32 statistics_at(u32 tile, u32 part, u32 row) {
    return STATISTICS + ((tile * Parts + part) * 8 * COLUMNS + row) * 8;
  }
  __device__ static float2& own(u32 place) { return *reinterpret_cast<float2*>(memory + place); }
  __device__ static void give(u32 place, u32 rank, float2 pair) { send(place, rank, pair); }  // to a CTA of the cluster
  __device__ float2 pair(u32 slot, u32 tile, u32 part, u32 lane) const { return own(pair_at(slot, tile, part, lane)); }
  __device__ float2 statistics(u32 tile, u32 part, u32 row) const { return own(statistics_at(tile, part, row)); }
};
// The same in memory, where CTAs meet that are no cluster.
struct InMemory {
  static constexpr bool HAS_ALL = HELPERS == 0, IN_MEMORY = true;  // all parts, or those of so many CTAs
  static constexpr u32 PARTS = CTAS, ADDED_BY = 1, PAIRS_OF_PART = ROW_TILES * PAIRS * 32;
  static constexpr u32 OF_PART = PAIRS_OF_PART + ROW_TILES * COLUMNS * 8;
  static constexpr u32 OF_HEAD = HELPERS > 0 ? CLUSTER : CTAS;  // helpers come behind all heads
  float2* from;
  u32 ctas, heads;   // that take part; of keys
  u64 first_helper;  // from this head's first part on
  __device__ InMemory(const Arguments& a, const Part& part) : ctas(part.ctas), heads(a.heads) {
    const u64 head = u64(part.which) * heads + part.head;
    from = a.sums + head * (OF_HEAD * OF_PART);
    first_helper = u64(gridDim.x - HELPERS / CLUSTER) * CLUSTER + part.first_helper + part.head - head * CLUSTER;
  }
  __device__ float2* of(u32 part) const {
    if (HELPERS > 0 && part >= CLUSTER) return from + (first_helper + (part - CLUSTER) * heads) * OF_PART;
    return from + part * OF_PART;
  }
  __device__ float2* pair_at(u32 number, u32 tile, u32 part, u32 lane) const {
    return of(part) + (number * ROW_TILES + tile) * 32 + lane;
  }
  __device__ float2* statistics_at(u32 tile, u32 part, u32 row) const {
    return of(part) + PAIRS_OF_PART + tile * COLUMNS * 8 + row;
  }
  __device__ float2 pair(u32 number, u32 tile, u32 part, u32 lane) const {
    return load_partial(pair_at(number, tile, part, lane));
  }
  __device__ float2 statistics(u32 tile, u32 part, u32 row) const {
    return load_partial(statistics_at(tile, part, row));
  }
};
// Behind the keys and values of new tokens: that of a CTA's warps, and that of the cluster's CTAs.
using OfWarps = Meeting<Config::puts ? 4 * ROW_TILES * NEW * SIZE : 0, PAIRS, TOKEN_WARPS, 1>;
using OfCluster = Meeting<OfWarps::END, SLOTS, CLUSTER, CLUSTER>;
static_assert((CLUSTER > 1 ? OfCluster::END : OfWarps::END) == Config::shared_bytes, "launch.py asks for as much");

// What each part of a row counts for in what they have together.
template <class At, bool IsKnown = At::HAS_ALL> struct Shares {
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
  __device__ __forceinline__ float2 total(const At& at, u32 slot, u32 tile, u32, u32 lane) const {
    float2 sum = {0, 0};
#pragma unroll
    for (u32 part = 0; part < At::PARTS; part++) {
      const float2 found = at.pair(slot, tile, part, lane);
      sum.x += of[part] * found.x, sum.y += of[part] * found.y;
    }
    return sum;
  }
};
// The same of parts of which only the device knows how many there are: no registers hold what they count for.
template <class At> struct Shares<At, false> {
  float highest, weights;
  __device__ __forceinline__ Shares(const At& at, u32 tile, u32 row, float sink = NONE) : highest(sink) {
#pragma unroll 8
    for (u32 part = 0; part < at.ctas; part++) highest = fmaxf(highest, at.statistics(tile, part, row).x);
    weights = weight_of(sink, highest);
#pragma unroll 8
    for (u32 part = 0; part < at.ctas; part++) {
      const float2 told = at.statistics(tile, part, row);
      weights += weight_of(told.x, highest) * told.y;
    }
  }
  __device__ __forceinline__ float2 total(const At& at, u32 number, u32 tile, u32 row, u32 lane) const {
    float2 sum = {0, 0};
#pragma unroll 4
    for (u32 part = 0; part < at.ctas; part++) {
      const float2 found = at.pair(number, tile, part, lane);
      const float of = weight_of(at.statistics(tile, part, row).x, highest);
      sum.x += of * found.x, sum.y += of * found.y;
    }
    return sum;
  }
};
// Scores of a lane's rows that have no value. They come from far away, and are asked for before sums meet.
struct Sinks {
  float of[COLUMNS][2];
  __device__ __forceinline__ Sinks(const Arguments& a, const Part& own, u32 tile, u32 lane) {
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        const u32 row = (tile * COLUMNS + column) * 8 + 2 * (lane % 4) + i;
        const u32 head = own.head * Config::group + min(row, ROWS - 1) / NEW;
        of[column][i] = NONE;
        if constexpr (Config::sinks == 1)
          of[column][i] = LOG2E * unpack(__ldg(static_cast<const u16*>(a.sinks) + head));
        if constexpr (Config::sinks == 2) of[column][i] = LOG2E * __ldg(static_cast<const float*>(a.sinks) + head);
      }
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
// What a CTA's warps have together, to where CTAs meet: pairs to those that add them up, and what weighs them to all.
template <class To>
__device__ __forceinline__ void pass_on(const To& to, u32 tile, u32 warp, u32 rank, u32 lane) {
  const OfWarps here;
  for_each_row(tile, warp, lane, [&](u32 row, u32 column, u32 i) {
    const Shares<OfWarps> shares(here, tile, row);
    if ((column * 2 + i) % TOKEN_WARPS == warp) {
      const float2 told = make_float2(shares.highest, shares.weights);
      if constexpr (To::IN_MEMORY) {
        if (lane < 4) *to.statistics_at(tile, rank, row) = told;
      } else {
#pragma unroll
        for (u32 other = lane / 4; other < CLUSTER; other += 8)
          OfCluster::give(OfCluster::statistics_at(tile, rank, row), other, told);
      }
    }
    return [=, &here](u32 number) {
      const float2 sum = shares.total(here, number, tile, row, lane);
      if constexpr (To::IN_MEMORY) *to.pair_at(number, tile, rank, lane) = sum;
      else OfCluster::give(OfCluster::pair_at(number / CLUSTER, tile, rank, lane), number % CLUSTER, sum);
    };
  });
}
// Whether a CTA is the last one of a head to pass on, which adds up.
__device__ __forceinline__ bool is_last(const Arguments& a, const Part& own) {
  u32& before = *reinterpret_cast<u32*>(memory);
  int* passed = a.counters + own.which * a.counters_text + own.head;
  __syncthreads();
  if (threadIdx.x == 0) {
    before = count(passed);
    if (before + 1 == own.ctas) *passed = 0;  // as it was found
  }
  __syncthreads();
  return before + 1 == own.ctas;
}
// The result: of pairs that several CTAs add up, those whose number is `rank`, each of which parts have in a slot.
template <class At>
__device__ __forceinline__ void add_up(const Arguments& a, const At& at, u32 tile, u32 warp, u32 rank, const Part& own,
                                       const Sinks& sinks, u32 lane) {
  for_each_row(tile, warp, lane, [&](u32 of_tile, u32 column, u32 i) {
    const u32 row = tile * 8 * COLUMNS + of_tile, of_group = own.head * Config::group + row / NEW;
    const Shares<At> shares(at, tile, of_tile, sinks.of[column][i]);
    const float all = fmaxf(shares.weights, 1.f);  // the highest score's weight alone is 1
    u16* out =
        a.out + ((u64(own.which) * NEW + row % NEW) * a.heads * Config::group + of_group) * SIZE + 8 * (lane / 4);
    return [=, &at](u32 number) {
      if (number % At::ADDED_BY != rank) return;
      const float2 sum = shares.total(at, number / At::ADDED_BY, tile, of_tile, lane);
      const u32 n = number / 2 % SUM_TILES, of = n / 2 * 2 + n % 2 * SUM_TILES;
      *reinterpret_cast<u32*>(out + 64 * (of / 8) + of % 8) = pack(sum.x / all, sum.y / all);
    };
  });
}
