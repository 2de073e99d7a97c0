// Pairs of a token and an expert, sorted by expert, and the tiles that follow: what the products of many pairs go by
// (linear/device/grouped.cuh draws `routes`).
//
// Bytes: the ids twice, and three numbers for each pair. A cluster of CTAs does it all in a few microseconds, or a
// single CTA where pairs are few or a GPU has no clusters, and nothing waits for the host. Each warp has a run of
// pairs, and counts those of each expert. Each CTA adds up what its warps have counted, and reads the sums of the
// others; then each warp knows where its pairs go. Pairs of an expert keep their order, so the same ids give the same
// routes. Ids that are no expert are nobody's, and their place is NOWHERE.
//
// Tiles are in the order of experts; or, with full_first, those that are full, and then the rest of each expert. Tiles
// are dealt out to multiprocessors in turn, so that short ones at the end even out what long ones leave uneven.
//
// Config: tile_m, rows of a tile; full_first; ctas; overlaps, whether this launch may begin before the one ahead is
// done; x, which is not looked at.

#include "linear/device/grouped.cuh"
#include "linear/device/places.cuh"

constexpr u32 CTAS = Config::ctas, WARPS = 8, THREADS = 32 * WARPS;
constexpr u32 AT_ONCE = 8;           // ids that a lane loads ahead
constexpr u32 MOST_OF_A_THREAD = 4;  // experts

struct Arguments {
  const void* ids;  // [pairs], of 32 bits or 64
  uint4* routes;
  u32 pairs, experts, wide_ids, most_tiles;
};

// [WARPS][experts], the CTA's own [experts], the `Moves`, and three times [WARPS].
extern __shared__ __align__(16) unsigned char memory[];

// How far the rows of an expert move where tiles are filled up, those from row number `rest` on by another number.
struct Moves {
  u32 by, rest, rest_by;
};

// The sum of `value` over the threads before this one, and over all of them.
struct Sums {
  u32 before, all;
};
__device__ __forceinline__ Sums add_up(u32 value, u32* of_warps, u32 warp, u32 lane) {
  const auto scan = [&](u32 until) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += other;
    }
    return until;
  };
  const u32 until = scan(value);
  if (lane == 31) of_warps[warp] = until;
  __syncthreads();
  const u32 warps = scan(lane < WARPS ? of_warps[lane] : 0);
  const u32 earlier = __shfl_sync(~0u, warps, (warp + 31) % 32), all = __shfl_sync(~0u, warps, WARPS - 1);
  return {(warp ? earlier : 0) + until - value, all};
}
// From the shared memory of the CTA of this rank.
__device__ __forceinline__ u32 load_from(const u32* place, u32 rank) {
  if constexpr (CTAS == 1) return *place;
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(value)
               : "r"(address_in(u32(__cvta_generic_to_shared(place)), rank))
               : "memory");
  return value;
}

__device__ __forceinline__ void sync_all() {
  if constexpr (CTAS == 1) __syncthreads();
  else sync_cluster();
}

// The pairs first + lane, first + 32 + lane, … of a warp: the expert of each or NOWHERE, and the lanes with the same
// one.
struct Pairs {
  u32 expert[AT_ONCE], alike[AT_ONCE], places[AT_ONCE];  // places: as of place_among, after `count`
  // By all lanes. end: the first pair that is not the warp's.
  __device__ __forceinline__ void load(const Arguments& a, u32 first, u32 end, u32 lane) {
    u64 ids[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 pair = first + 32 * i + lane;
      ids[i] = ~0ull;
      if (pair < end)
        ids[i] = a.wide_ids ? static_cast<const u64*>(a.ids)[pair] : u64(static_cast<const u32*>(a.ids)[pair]);
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      expert[i] = ids[i] < a.experts ? u32(ids[i]) : NOWHERE;
      alike[i] = __match_any_sync(~0u, expert[i]);
    }
  }
  // Adds them to what their warp has of each expert, whose numbers are at `own`.
  __device__ __forceinline__ void count(const u32* own, u32 lane) {
    count_pairs_of(places, u32(__cvta_generic_to_shared(own)), expert, alike, NOWHERE, lane);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) sort_pairs(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.y;
  const u32 number = rank * WARPS + warp;
  //: begins to sort
  u32 *counts = reinterpret_cast<u32*>(memory), *own = counts + warp * a.experts;
  u32* totals = counts + WARPS * a.experts;
  Moves* moves = reinterpret_cast<Moves*>(totals + a.experts);
  u32* rows_of_warps = reinterpret_cast<u32*>(moves + a.experts);
  u32 *tiles_of_warps = rows_of_warps + WARPS, *rests_of_warps = tiles_of_warps + WARPS;
  for (u32 e = lane; e < a.experts; e += 32) own[e] = 0;
  __syncwarp();
  if constexpr (Config::overlaps) {
    wait_for_prior_kernel();
    launch_dependents();
  }
  //: the kernel ahead of it is done
  // A run that is loaded at once stays in registers.
  const u32 run = (a.pairs + CTAS * THREADS - 1) / (CTAS * THREADS) * 32, end = min((number + 1) * run, a.pairs);
  Pairs pairs;
  for (u32 begin = number * run; begin < end; begin += 32 * AT_ONCE) {
    pairs.load(a, begin, end, lane);
    pairs.count(own, lane);
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < a.experts; e += THREADS) {
    u32 count[WARPS], rows = 0;  // all are loaded before any is stored, which may be the same to the compiler
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) count[w] = counts[w * a.experts + e];
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) counts[w * a.experts + e] = rows, rows += count[w];
    totals[e] = rows;
  }
  //: pairs are counted
  sync_all();
  // A thread has neighbouring experts. Of each: its rows in all CTAs, and those of earlier ones.
  const u32 share = (a.experts + THREADS - 1) / THREADS, first = threadIdx.x * share;
  u32 rows[MOST_OF_A_THREAD], earlier[MOST_OF_A_THREAD], all_rows = 0, all_tiles = 0, all_rests = 0;
  const auto rests = [](u32 rows) { return Config::full_first && rows % Config::tile_m > 0; };
  const auto tiles_of = [&](u32 rows) { return (rows + Config::tile_m - 1) / Config::tile_m - rests(rows); };
#pragma unroll
  for (u32 i = 0; i < MOST_OF_A_THREAD; i++) {
    rows[i] = earlier[i] = 0;
    if (i < share && first + i < a.experts)
#pragma unroll
      for (u32 r = 0; r < CTAS; r++) {
        const u32 there = load_from(totals + first + i, r);
        rows[i] += there;
        if (r < rank) earlier[i] += there;
      }
    all_rows += rows[i], all_tiles += tiles_of(rows[i]), all_rests += rests(rows[i]);
  }
  const Sums of_rows = add_up(all_rows, rows_of_warps, warp, lane);
  const Sums of_tiles = add_up(all_tiles, tiles_of_warps, warp, lane);
  const Sums of_rests = Config::full_first ? add_up(all_rests, rests_of_warps, warp, lane) : Sums{0, 0};
  if constexpr (CTAS > 1) arrive_cluster();  // the others' totals are here
  const u32 count_tiles = of_tiles.all + of_rests.all;
  uint4* table = a.routes + 1;
  u32 row = of_rows.before, tile = of_tiles.before, rest = of_tiles.all + of_rests.before;
  const auto put_tile = [&](u32 number, u32 expert, u32 first, u32 end) {
    if (number % CTAS == rank) table[number] = make_uint4(expert, first, min(u32(Config::tile_m), end - first), 0);
  };
#pragma unroll
  for (u32 i = 0; i < MOST_OF_A_THREAD; i++) {
    if (i >= share || first + i >= a.experts) break;
    u32 count[WARPS];
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) count[w] = counts[w * a.experts + first + i];
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) counts[w * a.experts + first + i] = count[w] + row + earlier[i];
    const u32 end = row + rows[i], begin_rest = row + tiles_of(rows[i]) * Config::tile_m;
    moves[first + i] = {tile * Config::tile_m - row, begin_rest, rest * Config::tile_m - begin_rest};
    for (; row < min(begin_rest, end); row += Config::tile_m) put_tile(tile++, first + i, row, end);
    if (rests(rows[i])) put_tile(rest++, first + i, begin_rest, end);
    row = end;
  }
  for (u32 i = count_tiles + rank * THREADS + threadIdx.x; i < a.most_tiles; i += CTAS * THREADS)
    table[i] = make_uint4(0, 0, 0, 0);
  if (rank == 0 && threadIdx.x == 0) *a.routes = make_uint4(count_tiles, 0, 0, 0);
  //: tiles are found
  __syncthreads();  // places are there
  u32* sorted = reinterpret_cast<u32*>(table + a.most_tiles);
  u32 *places = sorted + count_aligned(a.pairs), *in_tiles = places + count_aligned(a.pairs);
  for (u32 begin = number * run; begin < end; begin += 32 * AT_ONCE) {
    if (run > 32 * AT_ONCE) pairs.load(a, begin, end, lane);
    pairs.count(own, lane);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 pair = begin + 32 * i + lane, expert = pairs.expert[i],
                place = place_among(pairs.places[i], pairs.alike[i], lane);
      const bool valid = expert != NOWHERE;
      if (valid) sorted[place] = pair;
      const Moves move = valid ? moves[expert] : Moves{};
      const u32 in_tile = place + (place < move.rest ? move.by : move.rest_by);
      if (pair < end) places[pair] = valid ? place : NOWHERE, in_tiles[pair] = valid ? in_tile : NOWHERE;
    }
  }
  if constexpr (CTAS > 1) wait_for_cluster();  // nobody reads this CTA's totals any more
  //: pairs are sorted
}
