// Scores, weights, and sums, of a warp.

#include "block.cuh"
#include "shared.cuh"

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
            one = a.cap * LOG2E * (1 - __fdividef(2, exp2f(one * (2 * LOG2E * a.scale / a.cap)) + 1));
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
