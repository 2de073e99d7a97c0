// RMS norm of the x that multiplying warps hold.
//
// Each warp sums up the squares of its part of every row and leaves the sums in the shared memory of every CTA of the
// cluster; all then add up the same numbers in the same order. A row's bits do not depend on other rows.

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

__device__ __forceinline__ void normalize(const Arguments& a, u32 shared, uint2 (&x)[Config::m_tiles][Config::slice][4],
                                          u32 first_block, u32 warp, u32 lane) {
  constexpr u32 ROWS = 8 * Config::m_tiles, WARPS = Config::cluster * Config::warps;
  const u32 group = lane / 4, member = lane % 4, row_blocks = a.k / 64;
  const u32 number = blockIdx.y * Config::warps + warp;
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++) {
    float sum = 0;
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum = square_sum(x[c][b][i].y, square_sum(x[c][b][i].x, sum));
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const u32 to = shared + SQUARES + (number * ROWS + 8 * c + group) * 4;
    if constexpr (Config::cluster == 1) {
      if (member == 0) store_float(to, sum);
    } else {
#pragma unroll
      for (u32 rank = 0; rank < Config::cluster; rank++)
        if (member == rank % 4) send_sum(address_in(to, rank), sum, address_in(shared + SQUARES_FULL, rank));
    }
  }
  if constexpr (Config::cluster == 1) {
    meet<2, Config::warps * 32>();
  } else {
    wait(shared + SQUARES_FULL, 0);
  }
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++) {
    float sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) sum += load_float(shared + SQUARES + (w * ROWS + 8 * c + group) * 4);
    const float factor = rsqrtf(sum / float(a.k) + a.epsilon);
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 block = first_block + place(warp, b);
        const uint4 w = block < row_blocks
                            ? *reinterpret_cast<const uint4*>(a.norm + block * 64 + eight_at(member, half))
                            : make_uint4(0, 0, 0, 0);
        uint2 &first = x[c][b][2 * half], &second = x[c][b][2 * half + 1];
        first.x = normed(first.x, w.x, factor, a.norm_offset), first.y = normed(first.y, w.y, factor, a.norm_offset);
        second.x = normed(second.x, w.z, factor, a.norm_offset),
        second.y = normed(second.y, w.w, factor, a.norm_offset);
      }
  }
}
