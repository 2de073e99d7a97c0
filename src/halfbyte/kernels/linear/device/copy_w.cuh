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
__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const GroupedUnit& at, u32 full) {
  const u32 row = first_row(at), expert = at.tile.expert;
  if constexpr (Config::orders) {
    for (u32 piece = row / 16; piece < (row + TILE_ROWS) / 16; piece++, to += 16 * (UNIT_K / 2)) {
      const u32 in_turn = piece % (ORDER / 2), turn = piece / (ORDER / 2) * 4;
      if constexpr (HALVES) copy_box(to, map, byte, 0, 2 * in_turn, turn, expert, full);
      else copy_box(to, map, byte, 4 * in_turn, turn, expert, full);
    }
  } else if constexpr (HALVES) {
    copy_box(to, map, byte, 0, row / 2, expert, full);
  } else if constexpr (Config::back) {
    copy_box(to, map, row / 2, at.depth * UNIT_K, expert, full);
  } else {
    copy_box(to, map, byte, row, expert, full);
  }
}
