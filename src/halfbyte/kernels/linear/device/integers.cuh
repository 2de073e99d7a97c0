// Nibbles that stand for the integers from -8 to 7, as pairs of the type of x, without a table.

#include "numeric.cuh"

// bits & mask | base as one instruction: of constants in their places the compiler makes two.
__device__ __forceinline__ u32 insert(u32 bits, u32 mask, u32 base) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(base));
  return result;
}
// Of two 16-bit numbers with the last bits of a nibble each (below), the integers from -8 to 7.
__device__ __forceinline__ u32 minus_offset(u32 pair) {
  u32 integers;
  if constexpr (FP16) {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(integers) : "r"(pair), "r"(0x64086408));
  } else {  // times 1: sm_80 has no sum alone
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(integers) : "r"(pair), "r"(0x3f803f80), "r"(0xc308c308));
  }
  return integers;
}
// The same of two fp16 numbers with 16 times a nibble each.
__device__ __forceinline__ u32 sixteenth_minus_offset(u32 pair) {
  u32 integers;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(integers) : "r"(pair), "r"(0x2c002c00), "r"(0xd480d480));
  return integers;
}
// The integers of the nibbles at bits 0 and 16. The first bits of a number are those of 1024 in fp16 and of 128 in
// bf16, whose units in the last place are 1.
__device__ __forceinline__ u32 integers(u32 bits) {
  return minus_offset(insert(bits, 0x000f000f, FP16 ? 0x64006400 : 0x43004300));
}
// Those at bits 4 and 20.
__device__ __forceinline__ u32 upper_integers(u32 bits) {
  if constexpr (FP16) return sixteenth_minus_offset(insert(bits, 0x00f000f0, 0x64006400));
  else return integers(bits >> 4);
}
// Those of the eight nibbles of a word, two by two in the order of k.
__device__ __forceinline__ void integers_in_order(u32 word, u32 (&pairs)[4]) {
  const u32 high = word >> 4, first = Config::low_first ? word : high, second = Config::low_first ? high : word;
  pairs[0] = integers(__byte_perm(first, second, 0x0400)), pairs[1] = integers(__byte_perm(first, second, 0x0501));
  pairs[2] = integers(__byte_perm(first, second, 0x0602)), pairs[3] = integers(__byte_perm(first, second, 0x0703));
}
