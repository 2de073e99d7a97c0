// From nibbles to numbers of the type of x without a table, as Config::numbers has it: the integers from -8 to 7, or
// those of E2M1, which are a sign, two bits of an exponent and one of a mantissa.

#include "integers.cuh"
#include "scale.cuh"

constexpr bool COMPUTES = Config::numbers != Numbers::looked_up;

// The numbers of E2M1 of the nibbles at bits AT and AT + 16. As the last bits of an exponent and the first one of a
// mantissa, three bits stand for what they mean but for a power of two, and without an exponent they are subnormal in
// either type.
template <int AT> __device__ __forceinline__ u32 e2m1(u32 bits) {
  constexpr int TO = FP16 ? 9 : 6;
  const u32 magnitude = AT > TO ? bits >> (AT > TO ? AT - TO : 0) : bits << (AT > TO ? 0 : TO - AT);
  const u32 number = bits << (12 - AT) & 0x80008000 | magnitude & 0x00070007 << TO;
  return fold(number, FP16 ? 0x74007400 : 0x7e807e80);  // 2^14, 2^126
}
// The numbers of the nibbles at bits AT and AT + 16.
template <int AT> __device__ __forceinline__ u32 numbers_at(u32 bits) {
  if constexpr (Config::numbers == Numbers::e2m1) return e2m1<AT>(bits);
  else if constexpr (AT == 4) return upper_integers(bits);
  else return integers(bits >> AT);
}
// The eight numbers of a word, two by two in the order of k.
__device__ __forceinline__ void compute_pairs(u32 word, u32 (&pairs)[4]) {
  if constexpr (Config::numbers == Numbers::e2m1) {
    // A byte's two nibbles are the upper ones of two bytes.
    const u32 low = word << 4, first = Config::low_first ? low : word, second = Config::low_first ? word : low;
    pairs[0] = e2m1<12>(__byte_perm(first, second, 0x4000)), pairs[1] = e2m1<12>(__byte_perm(first, second, 0x5010));
    pairs[2] = e2m1<12>(__byte_perm(first, second, 0x6020)), pairs[3] = e2m1<12>(__byte_perm(first, second, 0x7030));
  } else {
    integers_in_order(word, pairs);
  }
}
