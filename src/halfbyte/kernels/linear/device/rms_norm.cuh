// RMS norm of a row of x: x * (norm_offset + norm[k]) / sqrt(mean of x^2 + epsilon), in fp32 and with one rounding.

#include "numeric.cuh"

// Of the two numbers of a word of x.
__device__ __forceinline__ float square_sum(u32 word, float sum) {
  const float first = unpack(word), second = unpack(word >> 16);
  return fmaf(second, second, fmaf(first, first, sum));
}
// The word of two numbers of x, times a row's factor and theirs of `weights`.
__device__ __forceinline__ u32 normed(u32 word, u32 weights, float factor, float offset) {
  return pack(unpack(word) * factor * (offset + unpack(weights)),
              unpack(word >> 16) * factor * (offset + unpack(weights >> 16)));
}
