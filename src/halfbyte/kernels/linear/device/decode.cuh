// From nibbles to the MMA's A operand. A table in shared memory has the two 16-bit numbers that each of 256 bytes
// stands for, with a copy for every lane: no bank conflicts, and the address is one byte permutation.
//
//   row b, 256 bytes:  | lane 0: first, second | lane 1: first, second | ... | lane 31 | 128 bytes for other uses |
//
// Dynamic shared memory begins with it. The table alone knows the codebook and which nibble comes first.

#include "ptx.cuh"

constexpr u32 BASE = 1024;      // where dynamic shared memory begins on sm_90 and later; every kernel checks it
constexpr u32 TABLE_ROW = 256;  // bytes, of the table that it begins with: two weights for each lane, in the lower half

// From the table that dynamic shared memory begins with.
__device__ __forceinline__ u32 load_word(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(address), "n"(BASE));
  return value;
}
// A lane's column of the table: its place in a row, and what is on top of `shared`, in a cluster the CTA's rank.
__device__ __forceinline__ u32 column_of(u32 shared, u32 lane) { return lane * 4 | shared & ~0u << 24; }
// The two numbers of byte J of `bytes`, which is the row of the table.
template <int J> __device__ __forceinline__ u32 look_up(u32 bytes, u32 column) {
  return load_word(__byte_perm(bytes, column, 0x7604 | (J << 4)));
}

// The table, by BY warps; in a cluster `table` has the CTA's rank on top. Four of its rows at a time, of which a lane
// writes four copies of a word.
template <u32 BY>
__device__ __forceinline__ void make_table(u32 table, const float (&codebook)[16], bool low_first, u32 warp, u32 lane) {
  const u32 own = pack(codebook[lane % 16], 0);
#pragma unroll
  for (u32 i = 0; i < (64 + BY - 1) / BY; i++) {
    const u32 four = i * BY + warp, byte = 4 * four + lane / 8;
    const u32 high = __shfl_sync(~0u, own, byte >> 4), low = __shfl_sync(~0u, own, byte & 15);
    if (four < 64)
      store_copies(table + byte * TABLE_ROW + lane % 8 * 16, low_first ? low | high << 16 : high | low << 16);
  }
}
