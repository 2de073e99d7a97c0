// The weights of a word, two by two, as operands: looked up in a table, or, with Config::computes, computed. Integers
// from -8 to 7 need no table, if x is paired as one mask takes nibbles out of a word: J and J + 4.

#include "decode.cuh"
#include "integers.cuh"

// Pair J of four: those of byte J, or of nibbles J and J + 4.
template <int J> __device__ __forceinline__ u32 weights_of(u32 word, u32 column) {
  if constexpr (!Config::computes) return look_up<J>(word, column);
  const u32 bits = J < 2 ? word : word >> 8;
  return J % 2 ? upper_integers(bits) : integers(bits);
}
// The eight numbers of x that meet a word, which come in the order of k, paired alike.
__device__ __forceinline__ uint4 paired_as_weights(uint4 x) {
  if constexpr (!Config::computes) return x;
  const u32 even[2] = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.y, x.w, 0x5410)};
  const u32 odd[2] = {__byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x7632)};
  return Config::low_first ? make_uint4(even[0], odd[0], even[1], odd[1])
                           : make_uint4(odd[0], even[0], odd[1], even[1]);
}
