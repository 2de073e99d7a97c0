// The copy of a tile's rows of W, by its tensor map, and for experts by that of the stack. The includer has first_row,
// of a tile. With Config::back W is read transposed.

#include "pipeline.cuh"
#include "scheduler.cuh"

__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const StreamUnit& at, u32 full) {
  if constexpr (Config::back) copy_box(to, map, first_row(at) / 2, at.depth * UNIT_K, full);
  else copy_box(to, map, byte, first_row(at), full);
}
// The map has {bytes of a row, rows, experts}, or {bytes, halves, rows, experts}.
__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const GroupedUnit& at, u32 full) {
  if constexpr (HALVES)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(map), "r"(byte), "r"(0), "r"(first_row(at) / 2), "r"(at.tile.expert), "r"(full)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(map), "r"(Config::back ? first_row(at) / 2 : byte), "r"(Config::back ? at.depth * UNIT_K : first_row(at)),
        "r"(at.tile.expert), "r"(full)
        : "memory");
}
