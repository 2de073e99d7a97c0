// How products of pairs of a token and an expert are stored (device/grouped.cuh). The includer has Arguments.

#include "epilogue.cuh"
#include "tile_rows.cuh"

// Two neighbours of a row of fp32 results, as store_two has them in 16 bits.
__device__ __forceinline__ void store_two(float* to, float first, float second, bool even, bool both) {
  if (even) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  } else {
    to[0] = first;
    if (both) to[1] = second;
  }
}

// Where the rows of a tile go, in rows of the result, and the biases of a lane's two rows of W. With ASKS_AHEAD they
// are asked for with the tile's first unit: behind its last all would wait for memory. Where rows go to the pairs' own,
// a warp reads all of them at once, and lanes tell each other.
struct Destination {
  u32 pairs[Config::scatters ? (Config::tile_m + 31) / 32 : 1];
  u16 bias[2];

  // n: a lane's first row of W, of its expert's tiles.
  template <class Unit> __device__ __forceinline__ void find(const Arguments& a, const Unit& at, u32 n) {
    if constexpr (Config::scatters)
#pragma unroll
      for (u32 i = 0; i < (Config::tile_m + 31) / 32; i++) {
        const u32 row = 32 * i + threadIdx.x % 32;
        pairs[i] = row < at.tile.rows ? pair_of(a, at.tile.first + row) : 0;
      }
    bias[0] = bias[1] = 0;
    if (a.bias && n < a.n) {
      bias[0] = a.bias[row_of(a, at, n)];
      if (n + 1 < a.n) bias[1] = a.bias[row_of(a, at, n + 1)];
    }
  }
  // By all lanes; they have the same row / 32.
  template <class Unit> __device__ __forceinline__ u32 row(const Unit& at, u32 row) const {
    if constexpr (Config::scatters) return __shfl_sync(~0u, pairs[row / 32], row % 32);
    return at.tile.first + row;
  }
};

// Stores this lane's sums of a tile: rows n and n + 1 of its expert's tiles, and of x the pairs 2 * member and
// 2 * member + 1 of each eight. With GATES these rows are a gate and its up, and one result.
template <int Sums, class Unit>
__device__ __forceinline__ void store_pairs(const Arguments& a, const float (&total)[Sums], const Destination& to,
                                            const Unit& at, u32 n, u32 member) {
  const bool even = a.n % 2 == 0, exists = n < a.n, both = n + 1 < a.n;
  const u32 columns = GATES ? a.n / 2 : a.n, column = GATES ? n / 2 : n;
  const float bias[2] = {unpack(to.bias[0]), unpack(to.bias[1])};
#pragma unroll
  for (u32 i = 0; i < Config::tile_m / 8; i++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 row = 8 * i + 2 * member + j;
      const u64 place = u64(to.row(at, row)) * columns + column;
      if (row >= at.tile.rows || !exists) continue;
      const float first = scale_and_add(total[4 * i + j], a.unit, bias[0]);
      const float second = scale_and_add(total[4 * i + 2 + j], a.unit, bias[1]);
      if constexpr (GATES) a.y[place] = narrow(gated<Config::activation>(first, second));
      else if constexpr (Config::wide) store_two(reinterpret_cast<float*>(a.y) + place, first, second, even, both);
      else store_two(a.y + place, pack(first, second), even, both);
    }
}
