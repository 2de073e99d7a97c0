// Where sums of CTAs meet that share a head of keys and are no cluster: in memory.
//
// With a static cache they come at the same time. So each adds up a share of the result: it leaves what it has in a
// workspace, and looks at what the others have until it is there (device/partials.cuh). That is one way through L2,
// where a counter takes three: what is left, the count, and what others have left. That all of a head do start is sure:
// they lie side by side and CTAs start in order, so a launch that has not started all of them has started all of most
// heads.
//
// Of texts in pages only some meet here, after one another. There the last one to count adds up.

#include "meet.cuh"

struct InMemory {
  // Of a part: pairs of all rows, tile by tile as groups of lanes have them; then each row's highest score and weights.
  static constexpr u32 OF_ROW = SUM_TILES * 8, PAIRS_OF_PART = ROWS * OF_ROW, OF_PART = PAIRS_OF_PART + ROWS;
  static constexpr u32 OF_HEAD = EXCHANGES ? CTAS : CLUSTER;  // helpers come behind all heads
  float2* from;
  u32 rank, ctas, heads;  // of this one, that take part; of keys
  u64 first_helper;       // from this head's first part on
  __device__ InMemory(const Arguments& a, const Part& part) : rank(part.rank), ctas(part.ctas), heads(a.heads) {
    const u64 head = u64(part.which) * heads + part.head;
    from = a.sums + head * (OF_HEAD * OF_PART);
    first_helper = u64(gridDim.x - CLUSTERS_OF_HELPERS) * CLUSTER + part.first_helper + part.head - head * CLUSTER;
  }
  __device__ float2* of(u32 part) const {
    if (HELPERS > 0 && part >= CLUSTER) return from + (first_helper + (part - CLUSTER) * heads) * OF_PART;
    return from + part * OF_PART;
  }
  __device__ __forceinline__ void tell(u32 tile, u32 row, u32 lane, float2 told) const {
    if (lane < 4) store_partial(of(rank) + PAIRS_OF_PART + tile * 8 * COLUMNS + row, told);
  }
  __device__ __forceinline__ void give(u32 tile, u32 number, u32 lane, float2 sum) const {
    const u32 row = (tile * COLUMNS + number / (2 * SUM_TILES)) * 8 + 2 * (lane % 4) + number % 2;
    store_partial(of(rank) + row * OF_ROW + number / 2 % SUM_TILES * 8 + lane / 4, sum);
  }
};
// Whether a CTA is the last one of a head to pass on, which adds up.
__device__ __forceinline__ bool is_last(const Arguments& a, const Part& own) {
  u32& before = *reinterpret_cast<u32*>(memory);
  int* passed = a.counters + own.which * a.heads + own.head;
  __syncthreads();
  if (threadIdx.x == 0) {
    before = count(passed);
    if (before + 1 == own.ctas) *passed = 0;  // as it was found
  }
  __syncthreads();
  return before + 1 == own.ctas;
}
// What a part of a row has, a pair of its sums: the highest score and the weights, and the sums.
struct Has {
  float2 told = {NONE, 0}, sum = {0, 0};
  __device__ __forceinline__ void load(const InMemory& there, u32 part, u32 pair) {
    const float2* from = there.of(part);
    told = load_partial(from + InMemory::PAIRS_OF_PART + pair / InMemory::OF_ROW), sum = load_partial(from + pair);
  }
  __device__ bool is_there() const { return !is_missing(told) && !is_missing(sum); }
  // Into sums that are weighed by the highest score of all.
  __device__ __forceinline__ void add_to(float& weights, float2& total, float highest) const {
    const float of = weight_of(told.x, highest);
    weights += of * told.y, total.x += of * sum.x, total.y += of * sum.y;
  }
};
// The result: of all pairs as many as every CTA adds up. Eight lanes have pairs that lie side by side, and each four of
// lanes have some of the parts of a pair: so looking takes few sectors of L2, which others still read through, and few
// instructions, which run once and come from far away as well.
__device__ __forceinline__ void add_up_shared(const Arguments& a, const InMemory& there, const Part& own) {
  constexpr u32 OF_LANE = (CTAS + 3) / 4, EACH = (InMemory::PAIRS_OF_PART + CTAS - 1) / CTAS;
  const u32 lane = threadIdx.x % 32, from = there.rank * EACH, end = min(from + EACH, InMemory::PAIRS_OF_PART);
#pragma unroll 1
  for (u32 first = threadIdx.x / 32 * 8; first < EACH; first += WARPS * 8) {
    const u32 pair = from + first + lane % 8, row = pair / InMemory::OF_ROW;
    const float sink = sink_of(a, own, row);
    Has has[OF_LANE];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (u32 i = 0; i < OF_LANE; i++)
        if (const u32 part = 4 * i + lane / 8; part < CTAS && pair < end) has[i].load(there, part, pair);
#pragma unroll
      for (u32 i = 0; i < OF_LANE; i++) missing |= !has[i].is_there();
    } while (__any_sync(~0u, missing));
    float highest = sink;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) highest = fmaxf(highest, has[i].told.x);
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 8));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 16));
    float weights = 0;
    float2 sum = {0, 0};
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) has[i].add_to(weights, sum, highest);
#pragma unroll
    for (u32 by = 8; by < 32; by *= 2) {
      weights += __shfl_xor_sync(~0u, weights, by);
      sum.x += __shfl_xor_sync(~0u, sum.x, by), sum.y += __shfl_xor_sync(~0u, sum.y, by);
    }
    weights += weight_of(sink, highest);
    if (lane < 8 && pair < end) store_result(a, own, row, pair / 8 % SUM_TILES, pair % 8, sum, weights);
  }
}
// All of the result, by one CTA; every part is there.
__device__ __forceinline__ void add_up_alone(const Arguments& a, const InMemory& there, const Part& own) {
  constexpr u32 AT_ONCE = 8;
#pragma unroll 1
  for (u32 pair = threadIdx.x; pair < InMemory::PAIRS_OF_PART; pair += THREADS) {
    const u32 row = pair / InMemory::OF_ROW;
    float highest = sink_of(a, own, row), weights = weight_of(highest, highest);
    float2 sum = {0, 0};
#pragma unroll 1
    for (u32 first = 0; first < there.ctas; first += AT_ONCE) {
      Has has[AT_ONCE];
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++)
        if (first + i < there.ctas) has[i].load(there, first + i, pair);
      float higher = highest;
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++) higher = fmaxf(higher, has[i].told.x);
      const float shrunk = weight_of(highest, higher);
      weights *= shrunk, sum.x *= shrunk, sum.y *= shrunk, highest = higher;
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++) has[i].add_to(weights, sum, highest);
    }
    store_result(a, own, row, pair / 8 % SUM_TILES, pair % 8, sum, weights);
  }
}
