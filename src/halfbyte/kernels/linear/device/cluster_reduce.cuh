// The sums of a tile that the CTAs of a cluster share, all of which have a part of it.

#include "pipeline.cuh"
#include "split_k.cuh"

// The CTA of rank r = blockIdx.y has those of its own column groups (r, r + cluster, ...) sent to its buffer, which the
// cluster no longer reads, and adds them up. `a` and `unit` say how many rows of x there are. buffer: the CTA's, 512
// bytes a warp, column group and sender. barriers: of its warps, eight bytes each, made here.
//
// A warp is sent what the same warps of the others have, and goes on when all of that is there. So nobody meets behind
// it: that would wait for all that threads have stored (meet_cluster).
template <u32 Warps, int Sums, class Arguments>
__device__ __forceinline__ void cluster_reduce(float (&total)[Sums], const Arguments& a, const WorkUnit& unit,
                                               u32 buffer, u32 barriers, u32 warp, u32 lane) {
  constexpr u32 GROUPS = Sums / 4;  // of columns
  const u32 own = buffer + warp * 512 + lane * 16, columns = a.m - unit.column_tile * (8 * GROUPS);
  const u32 barrier = barriers + 8 * warp;
  const auto place_of = [&](u32 i, u32 rank) {
    return own + (i / Config::cluster * Config::cluster + rank) * (Warps * 512);
  };
  if (lane == 0) {
    u32 groups = 0;
#pragma unroll
    for (u32 i = 0; i < GROUPS; i++) groups += is_own(i) && 8 * i < columns;
    init(barrier, 1);
    publish_barriers();
    expect(barrier, groups * (Config::cluster - 1) * 512);
  }
  __syncwarp();
  meet_cluster();  // nobody reads the buffer's former content any more, and barriers are made
#pragma unroll
  for (u32 i = 0; i < GROUPS; i++)
    if (!is_own(i) && 8 * i < columns) {
      const u32 to = i % Config::cluster;
      send_sums(address_in(place_of(i, blockIdx.y), to), group_of(total, i), address_in(barrier, to));
    }
  wait(barrier, 0);
#pragma unroll
  for (u32 i = 0; i < GROUPS; i++)
    if (is_own(i) && 8 * i < columns)
#pragma unroll
      for (u32 rank = 0; rank < Config::cluster; rank++)
        if (rank != blockIdx.y) add_group(total, i, load_sums(place_of(i, rank)));
}
