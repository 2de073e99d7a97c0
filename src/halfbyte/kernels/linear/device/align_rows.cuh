// Rows of x for copies of 16 bytes, where their length is no multiple of 8 numbers.

#include "numeric.cuh"

// Copies x [m, length] to `aligned`, rows of `pitch` numbers with zeros behind the last. `a` has the rest; all CTAs of
// the launch share the work.
template <u32 Threads, class Arguments>
__device__ __forceinline__ void align_rows(const Arguments& a, const u16* x, u32 length) {
  const u64 count = u64(a.m) * a.pitch;
  for (u64 i = u64(blockIdx.x) * Threads + threadIdx.x; i < count; i += u64(gridDim.x) * Threads) {
    const u32 column = i % a.pitch;
    a.aligned[i] = column < length ? x[i / a.pitch * length + column] : 0;
  }
}
