// From nibbles to the MMA's A operand without shared memory.
//
// The sixteen numbers that nibbles stand for, rounded to 16 bits, are 32 bytes: eight registers. A byte permute picks
// four bytes out of eight by the lower three bits of four nibbles. So four of them, and a mask that the upper bits
// make, give the low and the high bytes of four weights. Permutes come at half the rate of other instructions: in
// registers alone all look-ups would take as long as in shared memory alone (decode.cuh).

#include "numeric.cuh"

// A nibble of the selector picks a byte, 0 to 3 of a and 4 to 7 of b; with 8 on top, eight times that byte's upper bit.
// __byte_perm would mask that one.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

// Bytes 0 and 2 of a, 1 and 3 of b. A permute does the same in twice the time.
__device__ __forceinline__ u32 every_other(u32 a, u32 b) {
  u32 bytes;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(bytes) : "r"(a), "n"(0x00ff00ff), "r"(b));
  return bytes;
}

class PermutedTable {
 public:
  PermutedTable() = default;
  // number(i): what nibble i stands for, fp32.
  template <class Number> __device__ __forceinline__ explicit PermutedTable(const Number& number) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 a = pack(number(4 * i), number(4 * i + 2)), b = pack(number(4 * i + 1), number(4 * i + 3));
      low[i] = every_other(a, b << 8), high[i] = __byte_perm(a, b, 0x7351);
    }
  }
  // The eight weights of four bytes, two by two.
  __device__ __forceinline__ void look_up(u32 bytes, u32 (&pairs)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 l, h;
      look_up_half(bytes, i, l, h);
      pairs[2 * i] = __byte_perm(l, h, Config::low_first ? 0x5140 : 0x4051);
      pairs[2 * i + 1] = __byte_perm(l, h, Config::low_first ? 0x7362 : 0x6273);
    }
  }
  // The same, the first ones of each byte two by two, and the second ones.
  __device__ __forceinline__ void look_up_apart(u32 bytes, u32 (&firsts)[2], u32 (&seconds)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 l, h;
      look_up_half(bytes, i, l, h);
      const u32 even = every_other(l, h << 8), odd = __byte_perm(l, h, 0x7351);
      firsts[i] = Config::low_first ? even : odd, seconds[i] = Config::low_first ? odd : even;
    }
  }

 private:
  u32 low[4], high[4];  // bytes of the sixteen numbers

  // The low and the high bytes of the four weights of two bytes of four.
  __device__ __forceinline__ void look_up_half(u32 bytes, int half, u32& l, u32& h) const {
    // The upper bit of a nibble, in all bits of a byte.
    const u32 in_half = (bytes & 0x77777777) >> 16 * half, upper = permute(bytes << 4, bytes, half ? 0xfbea : 0xd9c8);
    l = pick(low, in_half, upper), h = pick(high, in_half, upper);
  }
  // Four bytes of sixteen: of the lower or the upper eight, as `upper` has no bit of a byte or all.
  static __device__ __forceinline__ u32 pick(const u32 (&bytes)[4], u32 in_half, u32 upper) {
    return permute(bytes[0], bytes[1], in_half) & ~upper | permute(bytes[2], bytes[3], in_half) & upper;
  }
};
