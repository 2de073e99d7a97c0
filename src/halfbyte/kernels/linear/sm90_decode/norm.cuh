// RMS norm of the x that multiplying warps hold.
//
// Each warp sums up the squares of its part of every row and leaves the sums in shared memory; whoever needs those of a
// row adds up the same numbers in the same order. A row's bits do not depend on other rows.
//
// In bf16 x is multiplied by the norm's weights alone, with one rounding, and what is added up by the row's factor
// (reduce.cuh). So no product waits for the sums of squares, and x takes a third of the instructions. Those of one row
// or two are the reducer's to find while the first tile is multiplied, in the same order. In fp16 x times weights may
// be too large, as Gemma's is: x is multiplied by both at once, and sums go to every CTA of the cluster.

#include "device/rms_norm.cuh"
#include "work.cuh"

__device__ __forceinline__ void prefetch_line(const u16* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}
// Brings the weights of this warp's part of x near, a line for each of its blocks, while the kernel ahead still runs.
__device__ __forceinline__ void prefetch_norm(const Arguments& a, u32 first_block, u32 warp, u32 lane) {
  const u32 block = first_block + place(warp, lane);
  if (lane < Config::slice && block < a.k / 64) prefetch_line(a.norm + block * 64);
}

// Two numbers of x times theirs of `weights`, plus themselves where `adds` has all bits, else none: with one rounding.
__device__ __forceinline__ u32 weighted(u32 word, u32 weights, u32 adds) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(weights), "r"(word & adds));
  return result;
}

// Of row `group` of a warp's x, to the four lanes that have it.
__device__ __forceinline__ float sum_of_squares(const uint2 (&x)[Config::slice][4]) {
  float sum = 0, other = 0;  // of every other word: half as long a chain
#pragma unroll
  for (int b = 0; b < Config::slice; b++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum = square_sum(x[b][i].x, sum), other = square_sum(x[b][i].y, other);
  sum += other;
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

constexpr u32 SQUARES_ROWS = 8 * Config::m_tiles, NUMBERS = Config::cluster * Config::warps;
// Whether the reducer sums up the squares itself. It has registers for that where none are handed over.
__device__ __forceinline__ bool reducer_squares(const Arguments& a) {
  return FOLDS_NORM && Config::registers == 0 && Config::m_tiles == 1 && a.m <= 2;
}
// The factor of a row of x, once all sums of squares are there.
__device__ __forceinline__ float factor_of(const Arguments& a, u32 shared, u32 row) {
  float sum = 0;
#pragma unroll
  for (u32 w = 0; w < NUMBERS; w++) sum += load_float(shared + SQUARES + (w * SQUARES_ROWS + row) * 4);
  return rsqrtf(sum / float(a.k) + a.epsilon);
}
// The same by one warp, which reads the row itself: four lanes add up what one multiplying warp of the cluster has.
__device__ __forceinline__ float read_factor(const Arguments& a, u32 row, u32 lane) {
  const u16* from = a.x + u64(row) * a.k;
  float sum = 0;
#pragma unroll 1
  for (u32 first = 0; first < NUMBERS; first += 8) {
    const u32 number = first + lane / 4;
    uint2 x[Config::slice][4];
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 block = number / Config::warps * BLOCKS + place(number % Config::warps, b);
        const bool exists = number < NUMBERS && block < a.k / 64;
        const uint4 both = exists ? *reinterpret_cast<const uint4*>(from + block * 64 + eight_at(lane % 4, half))
                                  : make_uint4(0, 0, 0, 0);
        x[b][2 * half] = make_uint2(both.x, both.y), x[b][2 * half + 1] = make_uint2(both.z, both.w);
      }
    const float own = sum_of_squares(x);
#pragma unroll
    for (u32 w = 0; w < 8; w++) {
      const float found = __shfl_sync(~0u, own, 4 * w);
      if (first + w < NUMBERS) sum += found;
    }
  }
  return rsqrtf(sum / float(a.k) + a.epsilon);
}

__device__ __forceinline__ void normalize(const Arguments& a, u32 shared, uint2 (&x)[Config::m_tiles][Config::slice][4],
                                          u32 first_block, u32 warp, u32 lane) {
  const u32 group = lane / 4, member = lane % 4, row_blocks = a.k / 64;
  const u32 number = blockIdx.y * Config::warps + warp;
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++) {
    if (reducer_squares(a)) break;
    const float sum = sum_of_squares(x[c]);
    const u32 to = shared + SQUARES + (number * SQUARES_ROWS + 8 * c + group) * 4;
    if constexpr (Config::cluster == 1) {
      if (member == 0) store_float(to, sum);
    } else {
#pragma unroll
      for (u32 rank = 0; rank < (FOLDS_NORM ? 1 : Config::cluster); rank++)
        if (member == rank % 4) send_sum(address_in(to, rank), sum, address_in(shared + SQUARES_FULL, rank));
    }
  }
  if constexpr (!FOLDS_NORM) {
    if constexpr (Config::cluster == 1) meet<2, Config::warps * 32>();
    else wait(shared + SQUARES_FULL, 0);
  }
  const u32 adds = a.norm_offset == 0 ? 0 : ~0u;
  const auto apply = [&](u32& word, u32 weights, float factor) {
    if constexpr (FOLDS_NORM) word = weighted(word, weights, adds);
    else word = normed(word, weights, factor, a.norm_offset);
  };
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++) {
    const float factor = FOLDS_NORM ? 1 : factor_of(a, shared, 8 * c + group);
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 block = first_block + place(warp, b);
        const uint4 w = block < row_blocks
                            ? *reinterpret_cast<const uint4*>(a.norm + block * 64 + eight_at(member, half))
                            : make_uint4(0, 0, 0, 0);
        uint2 &first = x[c][b][2 * half], &second = x[c][b][2 * half + 1];
        apply(first.x, w.x, factor), apply(first.y, w.y, factor);
        apply(second.x, w.z, factor), apply(second.y, w.w, factor);
      }
  }
}
