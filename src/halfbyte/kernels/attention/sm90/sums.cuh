// Scores, weights, and sums: of a warp, and where they meet.

#include "block.cuh"

// A warp's sums so far, of rows 2 member and 2 member + 1 of each group of eight: over all lanes but for the weights,
// which are this lane's own.
struct Sums {
  float highest[COLUMNS][2], weights[COLUMNS][2], of[COLUMNS][SUM_TILES][4];
  __device__ Sums() {
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++) {
      highest[column][0] = highest[column][1] = NONE, weights[column][0] = weights[column][1] = 0;
#pragma unroll
      for (u32 tile = 0; tile < SUM_TILES; tile++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) of[column][tile][i] = 0;
    }
  }
  // The weights of a block's scores, as the B operand of their product with values.
  __device__ __forceinline__ void weigh(u32 (&operand)[COLUMNS][2], float (&score)[COLUMNS][4], const Shifts& shifts,
                                        const Arguments& a) {
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++) {
      float weight[4];
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        float two[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          float one = score[column][2 * half + i];
          if constexpr (Config::capped)  // cap · tanh(score / cap)
            one = a.cap * LOG2E * (1 - 2 / (exp2f(one * (2 * LOG2E * a.scale / a.cap)) + 1));
          else one *= a.scale * LOG2E;
          two[half] = one + shifts.at(half, column, i);
        }
        float most = fmaxf(two[0], two[1]);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
        const float higher = fmaxf(highest[column][i], most), shrunk = weight_of(highest[column][i], higher);
        highest[column][i] = higher;
        weight[i] = weight_of(two[0], higher), weight[2 + i] = weight_of(two[1], higher);
        weights[column][i] = weights[column][i] * shrunk + weight[i] + weight[2 + i];
#pragma unroll
        for (u32 tile = 0; tile < SUM_TILES; tile++) of[column][tile][i] *= shrunk, of[column][tile][2 + i] *= shrunk;
      }
      operand[column][0] = transposed(pack(weight[0], weight[1]));
      operand[column][1] = transposed(pack(weight[2], weight[3]));
    }
  }
  __device__ __forceinline__ void add(const Values& values, const u32 (&operand)[COLUMNS][2]) {
#pragma unroll
    for (u32 tile = 0; tile < SUM_TILES; tile++) {
      const u32 a0 = values.pair(0, tile), a1 = values.pair(0, tile + SUM_TILES), a2 = values.pair(1, tile),
                a3 = values.pair(1, tile + SUM_TILES);
#pragma unroll
      for (u32 column = 0; column < COLUMNS; column++)
        mma(of[column][tile], a0, a1, a2, a3, operand[column][0], operand[column][1]);
    }
  }
  // To the CTAs of the cluster, which share what is to be added up: pairs of neighbouring numbers, lane by lane, to one
  // of them each, and of each row the highest score and the weights to all of them.
  __device__ __forceinline__ void leave(u32 tile, u32 part, u32 lane) {
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++) {
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        float all = weights[column][i];
        all += __shfl_xor_sync(~0u, all, 4);
        all += __shfl_xor_sync(~0u, all, 8);
        all += __shfl_xor_sync(~0u, all, 16);
        const u32 row = 8 * column + 2 * (lane % 4) + i;
#pragma unroll
        for (u32 rank = lane / 4; rank < Config::cluster; rank += 8)
          give(statistics_at(tile, part, row), rank, make_float2(highest[column][i], all));
      }
#pragma unroll
      for (u32 two = 0; two < SUM_TILES / 2; two++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
          const u32 number = (column * SUM_TILES / 2 + two) * 4 + i;
          const float2 pair = make_float2(of[column][2 * two][i], of[column][2 * two + 1][i]);
          if (tile * 8 * COLUMNS + 8 * column + 2 * (lane % 4) + i % 2 < ROWS)
            give(sums_at(number / Config::cluster, tile, part, lane), number % Config::cluster, pair);
        }
    }
  }
};

__device__ __forceinline__ void multiply(float (&score)[COLUMNS][4], const Keys& keys,
                                         const uint4 (&query)[COLUMNS][KEY_PARTS]) {
  float second[COLUMNS][4];  // an MMA waits for the one before it with the same sums
#pragma unroll
  for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) score[column][i] = second[column][i] = 0;
#pragma unroll
  for (u32 j = 0; j < KEY_PARTS; j++)
#pragma unroll
    for (u32 column = 0; column < COLUMNS; column++) {
      const uint4 upper = keys.of[0][j], lower = keys.of[1][j], x = query[column][j];
      mma(score[column], upper.x, lower.x, upper.y, lower.y, x.x, x.y);
      mma(second[column], upper.z, lower.z, upper.w, lower.w, x.z, x.w);
    }
#pragma unroll
  for (u32 column = 0; column < COLUMNS; column++)
#pragma unroll
    for (u32 i = 0; i < 4; i++) score[column][i] += second[column][i];
}

// Adds up what a CTA has been given of a tile's sums: pairs number `slot` * cluster + rank of all lanes, part after
// part.
__device__ __forceinline__ void add_up(const Arguments& a, u32 slot, u32 tile, u32 rank, u32 which, u32 head,
                                       u32 lane) {
  const u32 number = slot * Config::cluster + rank, i = number % 4, two = number / 4 % (SUM_TILES / 2);
  const u32 of_tile = 8 * (number / (2 * SUM_TILES)) + 2 * (lane % 4) + i % 2, row = tile * 8 * COLUMNS + of_tile;
  if (number >= SHARES || row >= ROWS) return;
  float highest = NONE, weights = 0;
#pragma unroll 8
  for (u32 part = 0; part < PARTS; part++) highest = fmaxf(highest, given(statistics_at(tile, part, of_tile)).x);
  if constexpr (Config::sinks != 0) {  // a score that has no value
    const u32 at = head * Config::group + row / NEW;
    const float sink = LOG2E * (Config::sinks == 1 ? unpack(__ldg(static_cast<const u16*>(a.sinks) + at))
                                                   : __ldg(static_cast<const float*>(a.sinks) + at));
    highest = fmaxf(highest, sink), weights = weight_of(sink, highest);
  }
  float2 sum = make_float2(0, 0);
#pragma unroll 8
  for (u32 part = 0; part < PARTS; part++) {
    const float2 told = given(statistics_at(tile, part, of_tile)), found = given(sums_at(slot, tile, part, lane));
    const float weight = weight_of(told.x, highest);
    weights += weight * told.y, sum.x += weight * found.x, sum.y += weight * found.y;
  }
  const float all = fmaxf(weights, 1.f);  // the highest score's weight alone is 1
  const u64 at = ((u64(which) * NEW + row % NEW) * a.heads + head) * Config::group + row / NEW;
  const u32 of = 2 * two + i / 2 * SUM_TILES, place = 64 * (of / 8) + 8 * (lane / 4) + of % 8;
  *reinterpret_cast<u32*>(a.out + at * SIZE + place) = pack(sum.x / all, sum.y / all);
}
