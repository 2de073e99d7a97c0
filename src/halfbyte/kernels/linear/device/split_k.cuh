// Split-K: the partial sums of CTAs that share a tile, and how they become one.
//
// A thread has Sums fp32 sums of its warp's 16 rows of W: sums 4 i to 4 i + 3 are those of column group i, eight rows
// of x, as device/mma.cuh draws them. All ways add in an order that follows from the shape alone, so the same input
// gives the same bits.
//
//   cluster_reduce  CTAs of one cluster, all of one tile: through distributed shared memory (cluster_reduce.cuh)
//   share_out       CTAs that have equal parts of one tile, and end at once: through a workspace in memory
//   fix_up          CTAs of any tile: through the workspace, too
//
// No counter and no barrier says that a sum is in the workspace: see device/partials.cuh.

#include "partials.cuh"
#include "scheduler.cuh"

// Of a launch's clusters: CTAs that share a run, or twins or mates, which have the same run with other rows of W or x.
constexpr u32 CLUSTER_CTAS = Config::cluster * Config::twins * Config::mates;
static_assert((Config::cluster > 1) + (Config::twins > 1) + (Config::mates > 1) <= 1, "either");
// Of the CTA in its cluster.
__device__ __forceinline__ u32 own_rank() { return CLUSTER_CTAS > 1 ? blockIdx.y : 0; }
// Of column groups: which the CTA adds up and stores.
__device__ __forceinline__ bool is_own(u32 group) {
  return Config::cluster == 1 || group % Config::cluster == blockIdx.y;
}

// How many of a thread's column groups are loaded at once: up to 8, and all of them in equal parts.
__device__ constexpr int chunk_of(int groups) {
  int chunk = groups < 8 ? groups : 8;
  while (groups % chunk) chunk--;
  return chunk;
}
// Those of column group i; and adds some to them.
template <int Sums> __device__ __forceinline__ float4 group_of(const float (&total)[Sums], int i) {
  return make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
}
template <int Sums> __device__ __forceinline__ void add_group(float (&total)[Sums], int i, float4 v) {
  total[4 * i] += v.x, total[4 * i + 1] += v.y, total[4 * i + 2] += v.z, total[4 * i + 3] += v.w;
}

// The sums of a tile that Shares CTAs have equal parts of; this is `cta`. They come to it at the same time, so all have
// something to add up: as in a cluster, the r-th of them those of the column groups r, r + Shares, ... To its own sums
// it adds those of the others, in the order of K. So one reads no more than it writes, and what it reads comes at once.
// All of a tile wait for each other. That they do start is sure: CTAs start in order, so a launch that has not started
// all of its own has started all of most tiles.
template <u32 Shares, u32 Warps, int Sums, class Arguments>
__device__ __forceinline__ void share_out(float (&total)[Sums], const Arguments& a, const WorkUnit& unit, u32 cta,
                                          u32 warp, u32 lane) {
  constexpr u32 GROUPS = Sums / 4, OWN = (GROUPS + Shares - 1) / Shares;          // of columns
  constexpr u32 ROOM = GROUPS <= 8 ? 16 : 8;                                      // groups that registers are left for
  constexpr u32 CHUNK = OWN < ROOM ? OWN : ROOM;                                  // own groups that are loaded at once,
  constexpr u32 AT_ONCE = ROOM / CHUNK < Shares - 1 ? ROOM / CHUNK : Shares - 1;  // of so many others
  const u32 rank = cta % Shares, columns = a.m - own_column_tile(unit) * (8 * GROUPS);
  const auto place_of = [&](u32 part, u32 i) {
    const u64 number = u64(cta - rank + part) * CLUSTER_CTAS + own_rank();
    return a.workspace + (number * Warps + warp) * (GROUPS * 32) + 32 * i + lane;
  };
#pragma unroll
  for (u32 i = 0; i < GROUPS; i++)
    if (i % Shares != rank && 8 * i < columns) store_partial(place_of(rank, i), group_of(total, i));
#pragma unroll
  for (u32 first = 0; first < Shares - 1; first += AT_ONCE)
#pragma unroll
    for (u32 chunk = 0; chunk < OWN; chunk += CHUNK) {
      float4 part[CHUNK][AT_ONCE];
      const auto wanted = [&](u32 i, u32 j) {
        return i % Shares == rank && i < GROUPS && 8 * i < columns && first + j < Shares - 1;
      };
      bool missing;
      do {  // until all are there
        missing = false;
#pragma unroll
        for (u32 g = 0; g < CHUNK; g++)
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; j++) {
            const u32 i = (chunk + g) * Shares + rank, other = first + j;
            part[g][j] = make_float4(0, 0, 0, 0);
            if (wanted(i, j)) part[g][j] = load_partial(place_of(other + (other >= rank), i));
          }
#pragma unroll
        for (u32 g = 0; g < CHUNK; g++)
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; j++) missing |= is_missing(part[g][j]);
      } while (__any_sync(~0u, missing));
#pragma unroll
      for (u32 i = chunk * Shares; i < (chunk + CHUNK) * Shares && i < GROUPS; i++)
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
          if (wanted(i, j)) add_group(total, i, part[i / Shares - chunk][j]);
    }
}

// The sums of the tile of `unit`, which the CTAs `first` to `last` of the schedule share; this is `cta`. A CTA that
// starts mid-tile stores its partial sums in the workspace and goes on: the tile is the first that it works on. The
// tile's first CTA comes to it last of all, waits for the partial sums of the others and adds them up in the order of
// K. True for that one. `a` has the schedule and the workspace; an argument of its own for either costs registers.
// Where the schedule deals out work to clusters, `cta` is the cluster, and CTAs of one rank add up those column groups
// that are their own. Of twins and mates `cta` is the number that both have.
//
// Where there are more than Direct, every third, fourth or so adds up those that follow it before it stores its own: it
// ends with this tile as well, unless nobody follows. All wait for CTAs of higher numbers only. Direct decides in which
// order the sums of a tile are added, so a product whose bits must not depend on the rows of x has one Direct for every
// width. Loaded: how many sums of several CTAs a thread loads at once, if not all of one.
//
// The first CTA has enough to read; so the next launch clears what is left, see Workspace in workspace.py.
template <u32 Direct, u32 Warps, u32 Loaded = 16, int Sums, class Arguments, class Unit>
__device__ __forceinline__ bool fix_up(float (&total)[Sums], const Arguments& a, const Unit& unit, u32 cta, u32 warp,
                                       u32 lane) {
  constexpr u32 AT_ONCE = Sums < Loaded ? Loaded / Sums : 1;  // CTAs whose sums are loaded at once
  constexpr int CHUNK = chunk_of(Sums / 4);                   // column groups that are
  const u32 units = count_units(a), tile = unit.row_tile * a.column_tiles + unit.column_tile;
  const u32 begin = tile * a.depth_units, limit = begin + a.depth_units;
  auto cta_of = [&](u32 unit) { return ((unit + 1) * a.ctas - 1) / units; };
  const u32 first = cta_of(begin), last = cta_of(limit - 1);
  auto place_of = [&](u32 cta) {
    return a.workspace + ((u64(cta) * CLUSTER_CTAS + own_rank()) * Warps + warp) * (Sums / 4 * 32) + lane;
  };
  const u32 parts = last - first + 1;
  const u32 group = parts <= Direct ? parts : parts <= 9 ? 3 : parts <= 16 ? 4 : parts <= 36 ? 6 : 8;
  const bool leads = (cta - first) % group == 0;
  u32 next = cta + 1, stride = 1, end = leads ? min(cta + group - 1, last) : cta;
  for (;;) {
    for (; next <= end; next += AT_ONCE * stride)
#pragma unroll
      for (int chunk = 0; chunk < Sums / 4; chunk += CHUNK) {
        float4 part[AT_ONCE][CHUNK];
        bool missing;
        do {  // until all are there
          missing = false;
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
              const u32 other = next + j * stride;
              if (is_own(chunk + i))
                part[j][i] = load_partial(place_of(other <= end ? other : next) + 32 * (chunk + i));
            }
#pragma unroll
          for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
              if (is_own(chunk + i)) missing |= is_missing(part[j][i]);
        } while (
            __any_sync(~0u, missing));  // of the whole warp: else nothing that comes after is the same in all lanes
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
#pragma unroll
          for (int i = 0; i < CHUNK; i++)
            if (is_own(chunk + i) && next + j * stride <= end) add_group(total, chunk + i, part[j][i]);
      }
    if (cta != first || end == last) break;
    next = first + group, stride = group, end = last;  // those that have added up others
  }
  if (cta == first) return true;
  float4* mine = place_of(cta);
#pragma unroll
  for (int i = 0; i < Sums / 4; i++)
    if (is_own(i)) store_partial(mine + 32 * i, group_of(total, i));
  return false;
}
