// Products of pairs of a token and an expert with a stack of experts. Pairs are sorted by expert; a tile of x has pairs
// of one expert, up to tile_m of them. Which, the kernel of kernels/experts/sort.cu has written ahead:
//
//   routes   {tiles, 0, 0, 0} | for each of column_tiles tiles {expert, first, rows, 0} |
//            the pair of each sorted row | each pair's sorted row, or NOWHERE |
//            each pair's row in tiles, tile by tile with tile_m rows each, or NOWHERE
//
// of which each part begins at a multiple of 16 bytes.
//
// column_tiles is the most that there can be; those that there are not have no rows. So nothing depends on the host.
//
// CTA c takes tiles c, c + ctas, and so on, each as a whole: at any time all CTAs work on neighbouring rows of one
// expert or a few, so that W and x come from memory once. The units of CTA c are numbered from c on.
//
// Their Arguments have the routes in `other`, and in `m` how many pairs share a row of x, or 0 where x is sorted. n is
// that of one expert. Where x is laid out, `stale_count` has the number of pairs.

#include "ptx.cuh"

struct Tile {
  u32 expert, first, rows;  // rows first to first + rows - 1 of the sorted ones
};

template <class Arguments> __device__ __forceinline__ const uint4* routes_of(const Arguments& a) {
  return reinterpret_cast<const uint4*>(a.other);
}
// From L2: `multiply` begins before the kernel that has read them ahead of it is done.
__device__ __forceinline__ uint4 load_route(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
template <class Arguments> __device__ __forceinline__ Tile tile_of(const Arguments& a, u32 column_tile) {
  const uint4 v = load_route(routes_of(a) + 1 + column_tile);
  return {v.x, v.y, v.z};
}
// The pairs of sorted rows.
template <class Arguments> __device__ __forceinline__ const u32* sorted_pairs(const Arguments& a) {
  return reinterpret_cast<const u32*>(routes_of(a) + 1 + a.column_tiles);
}
template <class Arguments> __device__ __forceinline__ u32 pair_of(const Arguments& a, u32 row) {
  return sorted_pairs(a)[row];
}
// The other way round: of a pair.
constexpr u32 NOWHERE = ~0u;
__device__ __forceinline__ u32 count_aligned(u32 pairs) { return (pairs + 3) / 4 * 4; }
template <class Arguments> __device__ __forceinline__ u32 count_pairs(const Arguments& a) { return a.stale_count; }
template <class Arguments> __device__ __forceinline__ u32 place_of(const Arguments& a, u32 pair) {
  return sorted_pairs(a)[count_aligned(count_pairs(a)) + pair];
}
template <class Arguments> __device__ __forceinline__ u32 row_in_tiles(const Arguments& a, u32 pair) {
  return sorted_pairs(a)[2 * count_aligned(count_pairs(a)) + pair];
}
// Rows of a tile that are laid out: x is copied by eights. What is behind them in shared memory ends in no result.
__device__ __forceinline__ u32 copied_rows(const Tile& tile) { return (tile.rows + 7) / 8 * 8; }

template <class Arguments> __device__ __forceinline__ u32 count_grouped_units(const Arguments& a, u32 cta) {
  const u32 tiles = load_route(routes_of(a)).x * a.row_tiles;
  return cta < tiles ? ((tiles - cta - 1) / a.ctas + 1) * a.depth_units : 0;
}

// Which tile, and which part of K. With Arguments::KNOWS_NEXT the tile that comes next is asked for a tile ahead, so
// that nobody waits for it.
struct GroupedUnit {
  u32 row_tile, column_tile, depth, number;
  Tile tile;
  template <class Arguments> __device__ GroupedUnit(const Arguments& a, u32 number) : depth(0), number(number) {
    find(a);
    tile = tile_at(a, column_tile);
    if constexpr (Arguments::KNOWS_NEXT) ask(a);
  }
  template <class Arguments> __device__ void next(const Arguments& a) {
    if (++depth < a.depth_units) return;
    depth = 0, number += a.ctas;
    find(a);
    if constexpr (Arguments::KNOWS_NEXT) tile = upcoming, ask(a);
    else tile = tile_at(a, column_tile);
  }

 private:
  Tile upcoming;

  template <class Arguments> __device__ void find(const Arguments& a) {
    column_tile = number / a.row_tiles, row_tile = number % a.row_tiles;
  }
  template <class Arguments> __device__ void ask(const Arguments& a) {
    upcoming = tile_at(a, (number + a.ctas) / a.row_tiles);
  }
  template <class Arguments> static __device__ Tile tile_at(const Arguments& a, u32 column_tile) {
    return tile_of(a, min(column_tile, a.column_tiles - 1));
  }
};
