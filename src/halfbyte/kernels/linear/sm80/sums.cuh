// From a warp's sums to y.

#include "work.cuh"

// Adds up the sums of the k_warps that share rows, in their order; the first of them has the result. It takes up to
// sixteen at a time, for which there is room beside the stages, which have the next tile's numbers already.
__device__ __forceinline__ void add_up(float (&total)[SUMS], u32 n_warp, u32 k_warp, u32 lane) {
  if constexpr (Config::k_warps > 1) {
    constexpr u32 CHUNK = SUMS % 16 == 0 ? 16 : SUMS % 8 == 0 ? 8 : 4;
    float4* meeting = reinterpret_cast<float4*>(memory + MEETING + n_warp * MEETING_BYTES) + lane;
#pragma unroll 1
    for (u32 other = 1; other < Config::k_warps; other++)
#pragma unroll
      for (u32 i = 0; i < SUMS; i += CHUNK) {
        if (k_warp == other)
#pragma unroll
          for (u32 j = i; j < i + CHUNK; j += 4)
            meeting[(j - i) * 8] = make_float4(total[j], total[j + 1], total[j + 2], total[j + 3]);
        __syncthreads();
        if (k_warp == 0)
#pragma unroll
          for (u32 j = i; j < i + CHUNK; j += 4) add_group(total, j / 4, meeting[(j - i) * 8]);
        __syncthreads();
      }
  }
}

// Stores a tile. row: the first of W that this lane has sums of, with the one behind it, in each group of 16.
template <bool Even>
__device__ __forceinline__ void store_rows(const Arguments& a, const float (&total)[SUMS], const WorkUnit& at, u32 row,
                                           u32 member) {
#pragma unroll
  for (u32 t = 0; t < Config::row_groups; t++) {
    const u32 n = at.row_tile * TILE_N + row + 16 * t;
    const bool exists = n < a.n, both = n + 1 < a.n;
    float bias[2] = {0, 0};
    if (a.bias) bias[0] = unpack(load_if(exists, a.bias + n)), bias[1] = unpack(load_if(both, a.bias + n + 1));
#pragma unroll
    for (u32 c = 0; c < Config::columns; c++)
#pragma unroll
      for (u32 j = 0; j < 2; j++) {
        const u32 m = at.column_tile * TILE_M + 8 * c + 2 * member + j, i = 4 * (t * Config::columns + c) + j;
        const float2 two = make_float2(total[i] + bias[0], total[i + 2] + bias[1]);
        store_two_if<Even>(exists && m < a.m, a.y + u64(m) * a.n + n, two, both);
      }
  }
}
__device__ __forceinline__ void store(const Arguments& a, const float (&total)[SUMS], const WorkUnit& at, u32 row,
                                      u32 member) {
  if (a.n % 2 == 0) store_rows<true>(a, total, at, row, member);
  else store_rows<false>(a, total, at, row, member);
}
