// Stream-K: the work is tiles, rows of W by rows of x, each cut along K into units, and numbered tile by tile. Every
// CTA takes an equal run of units, so a tile may be shared by several, and a CTA may begin and end in the middle of a
// tile.
//
//   units   0 1 2 3 | 4 5 6 7 | 8 9 10 11       three tiles of four units (column tiles first, then row tiles)
//   CTA     0 0 0 1   1 1 2 2   2 3 3 3         four CTAs
//
// `Schedule` is a kernel's arguments, with row_tiles, column_tiles, depth_units (units of a tile) and ctas. Units times
// CTAs are below 2^32.
//
// Of experts (Config::grouped) whole tiles are dealt out in turn instead, see device/grouped.cuh.

#include "grouped.cuh"
#include "numeric.cuh"

template <class Schedule> __device__ __forceinline__ u32 count_units(const Schedule& s) {
  return s.row_tiles * s.column_tiles * s.depth_units;
}
template <class Schedule> __device__ __forceinline__ u32 first_unit(const Schedule& s, u32 cta) {
  if constexpr (Config::grouped) return cta;
  return cta * count_units(s) / s.ctas;
}
// The one after the CTA's last.
template <class Schedule> __device__ __forceinline__ u32 end_unit(const Schedule& s, u32 cta) {
  if constexpr (Config::grouped) return cta + count_grouped_units(s, cta);
  return first_unit(s, cta + 1);
}
// The CTA whose run has this unit.
template <class Schedule> __device__ __forceinline__ u32 cta_of_unit(const Schedule& s, u32 unit) {
  return ((unit + 1) * s.ctas - 1) / count_units(s);
}

struct StreamUnit {  // which tile, and which part of K
  u32 row_tile, column_tile, depth;
  template <class Schedule> __device__ StreamUnit(const Schedule& s, u32 unit) {
    const u32 tile = unit / s.depth_units;
    depth = unit % s.depth_units;
    row_tile = tile / s.column_tiles;
    column_tile = tile % s.column_tiles;
  }
  template <class Schedule> __device__ void next(const Schedule& s) {
    if (++depth < s.depth_units) return;
    depth = 0;
    if (++column_tile < s.column_tiles) return;
    column_tile = 0;
    row_tile++;
  }
};

template <bool Grouped> struct UnitOf {
  typedef StreamUnit Unit;
};
template <> struct UnitOf<true> {
  typedef GroupedUnit Unit;
};
typedef UnitOf<Config::grouped>::Unit WorkUnit;

// Of tiles of x, the CTA's. Mates have neighbouring ones, which count as one.
template <class Unit> __device__ __forceinline__ u32 own_column_tile(const Unit& at) {
  return Config::mates > 1 ? at.column_tile * Config::mates + blockIdx.y : at.column_tile;
}
