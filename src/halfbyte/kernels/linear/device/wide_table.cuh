// From nibbles to the MMA's A operand by a table in shared memory of the two fp32 numbers that each of 256 bytes stands
// for, with a copy for every lane: no bank conflicts, and the address is one byte permutation.
//
//   row b, 256 bytes:  | lane 0: first, second | lane 1: first, second | ... | lane 31 |
//
// Dynamic shared memory begins with it.

#include "decode.cuh"
#include "scaled.cuh"

// Row b has the two numbers of byte b. By BY warps; in a cluster `table` has the CTA's rank on top.
template <u32 BY>
__device__ __forceinline__ void make_wide_table(u32 table, const float (&codebook)[16], u32 warp, u32 lane) {
  const float own = codebook[lane % 16];
  for (u32 byte = warp; byte < 256; byte += BY) {
    const float high = __shfl_sync(~0u, own, byte >> 4), low = __shfl_sync(~0u, own, byte & 15);
    const u32 at = table + byte * TABLE_ROW + lane * 8;
    if constexpr (Config::low_first) store_pair(at, low, high);
    else store_pair(at, high, low);
  }
}
// A lane's column of the table: its place in a row, and what is on top of `table`.
__device__ __forceinline__ u32 wide_column_of(u32 table, u32 lane) { return lane * 8 | table & ~0u << 24; }

// The two numbers of a byte of `bytes`, number J with the selector 0x7604 | J << 4.
__device__ __forceinline__ float2 numbers_of(u32 bytes, u32 column, u32 selector) {
  float2 numbers;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2 + %3];"
               : "=f"(numbers.x), "=f"(numbers.y)
               : "r"(__byte_perm(bytes, column, selector)), "n"(BASE));
  return numbers;
}
// The two weights of byte J of `bytes`, as dequantize rounds them.
template <int J> __device__ __forceinline__ u32 weights_of(u32 bytes, u32 column, float scale) {
  const float2 numbers = numbers_of(bytes, column, 0x7604 | (J << 4));
  return pack(scaled(numbers.x, scale), scaled(numbers.y, scale));
}
