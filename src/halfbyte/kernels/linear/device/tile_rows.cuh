// Which rows of x and of W the rows of a tile are, for kernels for which x is laid out: their Config has `tile_m`,
// `span` and `orders`.

#include "scheduler.cuh"

// Gate and up: neighbouring rows of tiles are a gate and its up, wherever they are in W. With `orders` the results of
// sixteen such rows, 16 bytes of a row of y, are a piece as the next product's x is laid out (lay_out.cuh).
constexpr bool GATES = Config::grouped && Config::activation != Activation::none;
constexpr bool INTERLEAVED = Config::activation == Activation::swiglu_oai;  // they are neighbours in W, too
constexpr bool HALVES = GATES && !INTERLEAVED;
constexpr u32 ORDER = 2 * (Config::span / 8);  // results from one of a piece's four pairs of neighbours to the next

// The result, of those of an expert in their usual order, that is number `place` of a row of y.
__device__ __forceinline__ u32 result_at(u32 place) {
  if constexpr (!Config::orders) return place;
  const u32 piece = place / 8, i = place % 8;
  return piece / (ORDER / 2) * (4 * ORDER) + piece % (ORDER / 2) * 2 + i / 2 * ORDER + i % 2;
}
// The row of W, among those of all experts, that row n of an expert's tiles is; beyond the last, that one.
template <class Arguments>
__device__ __forceinline__ u32 row_of(const Arguments& a, const GroupedUnit& at, u32 n) {
  const u32 begin = at.tile.expert * a.n;
  if constexpr (!GATES) return begin + min(n, a.n - 1);
  const u32 result = result_at(min(n / 2, a.n / 2 - 1));
  return begin + (HALVES ? n % 2 * (a.n / 2) + result : 2 * result + n % 2);
}
// Of a tile, the first row of x.
__device__ __forceinline__ u32 first_x_row(const StreamUnit& at) { return own_column_tile(at) * Config::tile_m; }
__device__ __forceinline__ u32 first_x_row(const GroupedUnit& at) { return at.tile.first; }
// The row of W that row n of tiles is.
template <class Schedule> __device__ __forceinline__ u32 row_of(const Schedule&, const StreamUnit&, u32 n) { return n; }
