// Of experts, the tiles that a CTA takes in turn, each in shared memory before any thread asks for it. Threads look
// ahead of the unit that is multiplied, each part of a stage by another number of units. If a tile's facts were loaded
// where they are needed, every stage would have branches, and a thread would wait for memory at each of them.
//
// There is a ring of TILES_KEPT tiles, and one of the pairs of ROWS_KEPT tiles, which say where rows of x are. When a
// tile has been multiplied, copies set out: of the tile TILES_AHEAD after it, and of the pairs of that ROWS_AHEAD after
// it. Nobody asks for more than two tiles ahead, since a tile has two units at least (plan.py) and three are under way.
// A slot's last readers are a tile behind, with a barrier between.

#include "work.cuh"

constexpr u32 TILES_AHEAD = 6, ROWS_AHEAD = 3, ROW_TILES = TURNS + TILES_KEPT * 16,
              PAIRS_OF_ROWS = ROW_TILES + TILES_KEPT * 4;
static_assert(!Config::grouped || Config::stages == 3, "copies of pairs are there after two stages");

// A unit's tile along what is produced.
__device__ __forceinline__ u32 row_tile_of(const StreamUnit& at) { return at.row_tile; }
__device__ __forceinline__ u32 row_tile_of(const Turn& at) {
  return reinterpret_cast<const u32*>(memory + ROW_TILES)[at.tile % TILES_KEPT];
}
// What a tile of the ring is, by its number among those of this CTA.
__device__ __forceinline__ Tile kept_tile(u32 tile) {
  const uint4 v = reinterpret_cast<const uint4*>(memory + TURNS)[tile % TILES_KEPT];
  return {v.x, v.y, v.z};
}
// Of experts, its pairs; and those of the tile's rows or, where x is sorted, the rows' numbers among all.
__device__ __forceinline__ Tile pairs_of(const StreamUnit&) { return {}; }
__device__ __forceinline__ Tile pairs_of(const Turn& at) { return kept_tile(at.tile); }
__device__ __forceinline__ const u32* pairs_of_rows(const StreamUnit&) { return nullptr; }
__device__ __forceinline__ const u32* pairs_of_rows(const Turn& at) {
  return reinterpret_cast<const u32*>(memory + PAIRS_OF_ROWS) + at.tile % ROWS_KEPT * TILE_M;
}
// Where its rows of x begin, and how many there are.
__device__ __forceinline__ u32 first_row_of(const StreamUnit& at) { return at.column_tile * TILE_M; }
__device__ __forceinline__ u32 first_row_of(const Turn& at) { return pairs_of(at).first; }
__device__ __forceinline__ u32 rows_of(const Arguments& a, const StreamUnit& at) {
  return first_row_of(at) < a.m ? a.m - first_row_of(at) : 0;
}
__device__ __forceinline__ u32 rows_of(const Arguments&, const Turn& at) { return pairs_of(at).rows; }
// Of those, the ones from `row` on.
__device__ __forceinline__ u32 rows_from(const Arguments& a, const Walk& at, u32 row) {
  const u32 rows = rows_of(a, at);
  return rows > row ? rows - row : 0;
}

// Copies set out, as part of the group that is closed next. `tile`: its number among those of this CTA; behind the last
// one it may be any. A thread brings a tile, all of them its pairs. start: the address of shared memory.
__device__ __forceinline__ void bring_tile(const Arguments& a, u32 start, u32 tile) {
  const u32 number = own_number() + tile * a.ctas, column_tile = number / a.row_tiles, slot = tile % TILES_KEPT;
  copy_async(start + TURNS + slot * 16, routes_of(a) + 1 + min(column_tile, a.column_tiles - 1), true);
  reinterpret_cast<u32*>(memory + ROW_TILES)[slot] = number % a.row_tiles;
}
__device__ __forceinline__ void bring_pairs(const Arguments& a, u32 start, u32 tile) {
  const Tile of = kept_tile(tile);
  const u32* from = sorted_pairs(a) + of.first;
  for (u32 row = threadIdx.x; row < of.rows; row += THREADS) {
    const u32 to = PAIRS_OF_ROWS + (tile % ROWS_KEPT * TILE_M + row) * 4;
    if (a.m) copy_word_async(start + to, from + row);
    else *reinterpret_cast<u32*>(memory + to) = of.first + row;
  }
}
// The first ones, and waits for them.
__device__ __forceinline__ void bring_first_turns(const Arguments& a, u32 start) {
  if (threadIdx.x < TILES_AHEAD) bring_tile(a, start, threadIdx.x);
  close_group();
  wait_for_groups<0>();
  __syncthreads();
  for (u32 tile = 0; tile < ROWS_AHEAD; tile++) bring_pairs(a, start, tile);
  close_group();
  wait_for_groups<0>();
  __syncthreads();
}
// Those that come when a unit, the last of its tile, has been multiplied and its tile is stored.
__device__ __forceinline__ void bring_next_turns(const Arguments&, u32, const StreamUnit&) {}
__device__ __forceinline__ void bring_next_turns(const Arguments& a, u32 start, const Turn& at) {
  if (threadIdx.x == 0) bring_tile(a, start, at.tile + TILES_AHEAD);
  bring_pairs(a, start, at.tile + ROWS_AHEAD);
}
