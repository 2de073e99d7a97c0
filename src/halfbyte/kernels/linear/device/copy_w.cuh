// The copy of a tile's rows of W, by its tensor map, and for experts by that of the stack. The includer has first_row,
// of a tile. With Config::back W is read transposed.

#include "pipeline.cuh"
#include "tile_rows.cuh"

__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const StreamUnit& at, u32 full) {
  if constexpr (Config::back) copy_box(to, map, first_row(at) / 2, at.depth * UNIT_K, full);
  else copy_box(to, map, byte, first_row(at), full);
}
// The map has {bytes of a row, rows, experts}, or {bytes, halves, rows, experts}. With `orders` rows are told by their
// places in two dimensions, and one copy brings the 16 rows of a piece of results.
__device__ __forceinline__ void copy_box(u32 to, u64 map, u32 x, u32 y, u32 z, u32 full) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(full)
      : "memory");
}
__device__ __forceinline__ void copy_box(u32 to, u64 map, u32 x, u32 y, u32 z, u32 u, u32 full) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(full)
      : "memory");
}
__device__ __forceinline__ void copy_box(u32 to, u64 map, u32 x, u32 y, u32 z, u32 u, u32 v, u32 full) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "r"(full)
      : "memory");
}
// What is done with boxes of W that lie one behind the other in shared memory: they are copied there, or L2 is asked
// for them.
struct Copying {
  u64 map;
  u32 to, full;
  template <class... At> __device__ __forceinline__ void box(At... at) const { copy_box(to, map, at..., full); }
};
struct Prefetching {
  u64 map;
  u32 to = 0;
  template <class... At> __device__ __forceinline__ void box(At... at) const { prefetch_box(map, at...); }
};
// With a unit of an expert, from byte `byte` of its rows on; row: the tile's first.
template <class Doing>
__device__ __forceinline__ void with_boxes(Doing doing, u32 byte, u32 row, u32 depth, u32 expert) {
  if constexpr (Config::orders) {
    for (u32 piece = row / 16; piece < (row + TILE_ROWS) / 16; piece++, doing.to += 16 * (UNIT_K / 2)) {
      const u32 in_turn = piece % (ORDER / 2), turn = piece / (ORDER / 2) * 4;
      if constexpr (HALVES) doing.box(byte, 0, 2 * in_turn, turn, expert);
      else doing.box(byte, 4 * in_turn, turn, expert);
    }
  } else if constexpr (HALVES) {
    doing.box(byte, 0, row / 2, expert);
  } else if constexpr (Config::back) {
    doing.box(row / 2, depth * UNIT_K, expert);
  } else {
    doing.box(byte, row, expert);
  }
}
__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const GroupedUnit& at, u32 full) {
  with_boxes(Copying{map, to, full}, byte, first_row(at), at.depth, at.tile.expert);
}
// While pairs are sorted memory is idle, and there are so many that most experts are wanted. So L2 is asked for the
// first tile that a CTA of `multiply` has where each expert has one tile of pairs. It is read early on in any case.
__device__ __forceinline__ void prefetch_likely(const Arguments& a, u32 cta) {
  for (u32 depth = 0; depth < a.depth_units; depth++)
    with_boxes(Prefetching{map_of(a)}, depth * (UNIT_K / 2), cta % a.row_tiles * TILE_ROWS, depth, cta / a.row_tiles);
}
