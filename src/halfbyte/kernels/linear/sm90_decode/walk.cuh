// Which tiles a CTA takes, one after the other.
//
// Of one weight or several: every gridDim.x-th tile, or both tiles of every gridDim.x-th gated pair. Of experts:
// `neighbours` CTAs take those of a run in turn, unit by unit. Runs of all tiles are of the same length.

#include "routes.cuh"

// part: the number of the weight. row: the first row there, of all experts of a stack. half: 0 gate, 1 up. unit, own:
// its unit, and its first row in the expert's results, or in either half of them.
struct Tile {
  u32 part = 0, row, half = 0, unit = 0, own;
};

class Walk {
 public:
  __device__ __forceinline__ Walk(const Arguments& a, u32 shared) : a(a), shared(shared) {
    if constexpr (!ROUTED) {
      number = PAIRED ? 2 * blockIdx.x : blockIdx.x;
      return;
    }
    const u32 all = load_number(shared + UNITS) * a.tiles;
    const u32 first = blockIdx.x / Config::neighbours * Config::neighbours;
    turns = min(u32(Config::neighbours), gridDim.x - first);
    number = first * all / gridDim.x + blockIdx.x % Config::neighbours, end = (first + turns) * all / gridDim.x;
    unit = number / a.tiles, tile = number % a.tiles;
  }
  __device__ __forceinline__ bool is_there() const {
    if constexpr (!ROUTED) return number < a.tiles;
    return number < end;
  }
  // Whether there is one so many behind this one, an even number.
  __device__ __forceinline__ bool is_there_behind(u32 others) const {
    if constexpr (!ROUTED) return number + others * gridDim.x < a.tiles;
    return number + others / (PAIRED ? 2 : 1) * turns < end;
  }
  __device__ __forceinline__ void next() {
    if constexpr (!ROUTED) {
      number = !PAIRED ? number + gridDim.x : number % 2 == 0 ? number + 1 : number + 2 * gridDim.x - 1;
    } else {
      if (PAIRED && (half ^= 1)) return;
      number += turns;
      for (tile += turns; tile >= a.tiles; tile -= a.tiles) unit++;
    }
  }
  __device__ __forceinline__ Tile get() const {
    Tile found;
    if constexpr (ROUTED) {
      found.half = half, found.unit = unit, found.own = tile * TILE_N;
      found.row = expert_of(shared, unit) * a.expert_rows + half * (a.expert_rows / 2) + found.own;
    } else if constexpr (PAIRED) {
      found.part = found.half = number % 2, found.row = found.own = number / 2 * TILE_N;
    } else {
#pragma unroll
      for (int i = 1; i < Config::parts; i++) found.part += number >= a.first_tile[i];
      found.row = found.own = (number - (Config::parts > 1 ? a.first_tile[found.part] : 0)) * TILE_N;
    }
    return found;
  }

 private:
  const Arguments& a;
  u32 shared, turns = 1, number = 0, end = 0, unit = 0, tile = 0, half = 0;
};
