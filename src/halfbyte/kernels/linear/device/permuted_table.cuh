// From nibbles to the MMA's A operand without shared memory.
//
// The sixteen numbers that nibbles stand for, rounded to 16 bits, are 32 bytes: eight registers. A byte permute picks
// four bytes out of eight by four nibbles, so four of them and two that choose between the halves give the low and the
// high bytes of four weights. Permutes come at half the rate of other instructions: in registers alone all look-ups
// would take as long as in shared memory alone (decode.cuh).

#include "numeric.cuh"

class PermutedTable {
 public:
  // number(i): what nibble i stands for, fp32.
  template <class Number> __device__ __forceinline__ explicit PermutedTable(const Number& number) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 a = pack(number(4 * i), number(4 * i + 1)), b = pack(number(4 * i + 2), number(4 * i + 3));
      low[i] = __byte_perm(a, b, 0x6420), high[i] = __byte_perm(a, b, 0x7531);
    }
  }
  // The eight weights of four bytes, two by two.
  __device__ __forceinline__ void look_up(u32 bytes, u32 (&pairs)[4]) const {
    // A nibble's lower three bits pick of either half; its highest bit picks the half.
    const u32 lower = bytes & 0x77777777, highest = bytes >> 1 & 0x44444444 | 0x32103210;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 in_half = lower >> 16 * i, half = highest >> 16 * i;
      const u32 l = pick(low, in_half, half), h = pick(high, in_half, half);
      pairs[2 * i] = __byte_perm(l, h, Config::low_first ? 0x5140 : 0x4051);
      pairs[2 * i + 1] = __byte_perm(l, h, Config::low_first ? 0x7362 : 0x6273);
    }
  }

 private:
  u32 low[4], high[4];  // bytes of the sixteen numbers

  // Four bytes of sixteen.
  static __device__ __forceinline__ u32 pick(const u32 (&bytes)[4], u32 in_half, u32 half) {
    return __byte_perm(__byte_perm(bytes[0], bytes[1], in_half), __byte_perm(bytes[2], bytes[3], in_half), half);
  }
};
