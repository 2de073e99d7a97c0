// How products of pairs of a token and an expert are stored (device/grouped.cuh). The includer has Arguments.

#include "epilogue.cuh"
#include "tile_rows.cuh"

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

template <bool Wide> struct ResultOf {
  typedef u16 Type;
};
template <> struct ResultOf<true> {
  typedef float Type;
};
// even: the rows of an expert are of an even number.
template <bool Even, int Sums, class Unit>
__device__ __forceinline__ void store_pairs_of(const Arguments& a, const float (&total)[Sums], const Destination& to,
                                               const Unit& at, u32 n, u32 member) {
  const bool exists = n < a.n, both = n + 1 < a.n;
  const u32 columns = GATES ? a.n / 2 : a.n, column = GATES ? n / 2 : n;
  const float bias[2] = {unpack(to.bias[0]), unpack(to.bias[1])};
  auto* y = reinterpret_cast<typename ResultOf<Config::wide>::Type*>(a.y) + column;
#pragma unroll
  for (u32 i = 0; i < Config::tile_m / 8; i++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 row = 8 * i + 2 * member + j;
      const auto place = y + u64(to.row(at, row)) * columns;
      const bool wanted = exists && row < at.tile.rows;
      const float first = scale_and_add(total[4 * i + j], a.unit, bias[0]);
      const float second = scale_and_add(total[4 * i + 2 + j], a.unit, bias[1]);
      if constexpr (GATES) store_if(wanted, place, narrow(gated<Config::activation>(first, second)));
      else store_two_if<Even>(wanted, place, make_float2(first, second), both);
    }
}
// Stores this lane's sums of a tile: rows n and n + 1 of its expert's tiles, and of x the pairs 2 * member and
// 2 * member + 1 of each eight. With GATES these rows are a gate and its up, and one result.
template <int Sums, class Unit>
__device__ __forceinline__ void store_pairs(const Arguments& a, const float (&total)[Sums], const Destination& to,
                                            const Unit& at, u32 n, u32 member) {
  if (GATES || a.n % 2 == 0) store_pairs_of<true>(a, total, to, at, n, member);
  else store_pairs_of<false>(a, total, to, at, n, member);
}
