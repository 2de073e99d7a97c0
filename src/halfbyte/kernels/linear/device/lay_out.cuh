// The kernel that runs ahead of `multiply` where x is laid out in memory: it writes x in the swizzled tiles that wgmma
// reads, with zeros beyond M and K. The includer has X_BYTES (of a unit), SPAN_WORDS and OWN (words of a span, and
// those of one lane of a quad); its Arguments are device/laid_out.cuh's.

#include "ptx.cuh"
#include "scale_rows.cuh"

// Zeros for the results of pairs that have no expert. CTA `cta` of `ctas`: each of its warps takes a pair at a time.
__device__ __forceinline__ void clear_rows(const Arguments& a, u32 cta, u32 ctas) {
  const u32 lane = threadIdx.x % 32, pairs = count_pairs(a);
  for (u32 pair = cta * 4 + threadIdx.x / 32; pair < pairs; pair += ctas * 4) {
    if (place_of(a, pair, pairs) != NOWHERE) continue;
    u16* row = a.y + u64(pair) * a.n;
    if (a.n % 8 == 0)
      for (u32 i = lane; i < a.n / 8; i += 32) reinterpret_cast<uint4*>(row)[i] = make_uint4(0, 0, 0, 0);
    else
      for (u32 i = lane; i < a.n; i += 32) row[i] = 0;
  }
}

constexpr u32 AT_ONCE = Config::grouped ? 4 : 1;  // blocks of 64 numbers, in a thread's step

// Prepares for `multiply`. For each CTA of that kernel one CTA here prefetches scales to L2; the others lay x [m, k]
// out as [tile of x][K / 64][tile_m rows][128 bytes, whose 16-byte pieces are swizzled by the row]. A word is two
// neighbouring k; piece j of a span holds word j of each of a quad's four lanes. With `grouped` a tile has the rows of
// x that pairs of one expert want. With `back` the order of k stays, and K may be odd.
//
// A thread has the same piece of a row in every block of a run of steps. With `grouped` a run is long: it takes two
// loads, one after the other, to find the row, and the next step is loaded while this one is stored. The host says by
// the size of the grid how many runs a tile has.
extern "C" __global__ void __launch_bounds__(128) lay_out(const __grid_constant__ Launched launched) {
  // `multiply` waits for this kernel alone and reads W at once, so it may start only when all work before is done.
  wait_for_prior_kernel();
  launch_dependents();
  const u32 ctas = count_ctas(launched);
  if (blockIdx.x < ctas) {
    const Arguments& a = part_of(launched, blockIdx.x);
    if constexpr (!Config::back) prefetch_scales(a, blockIdx.x - a.first_cta, threadIdx.x);
    return;
  }
  const Arguments& a = launched.part[0];
  if constexpr (Config::scatters) clear_rows(a, blockIdx.x - ctas, gridDim.x - ctas);
  constexpr u32 OF_TILE = 8 * Config::tile_m;  // threads of a run
  const u32 index = (blockIdx.x - ctas) * 128 + threadIdx.x;
  const u32 steps = a.depth_units * (4 / AT_ONCE), runs = (gridDim.x - ctas) * 128 / (a.column_tiles * OF_TILE);
  const u32 in_run = (steps + runs - 1) / runs, first = index / OF_TILE % runs * in_run;
  const u32 last = min(first + in_run, steps);
  const u32 piece = index % 8, row = index / 8 % Config::tile_m, column_tile = index / OF_TILE / runs;
  if (column_tile >= a.column_tiles || first >= last) return;
  u32 m = column_tile * Config::tile_m + row;
  bool exists = m < a.m;
  if constexpr (Config::grouped) {
    const Tile tile = tile_of(a, column_tile);
    if (row >= copied_rows(tile)) return;
    exists = row < tile.rows;
    m = tile.first + row;
    if (exists && a.m) m = pair_of(a, m) / a.m;
  }
  const u32 word = piece / OWN * SPAN_WORDS + piece % OWN;
  const u16* x = a.x + u64(m) * a.k;
  const auto load = [&](u32(&words)[AT_ONCE][4], u32 step) {
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (u32 member = 0; member < 4; member++) {
        const u32 at = (step * AT_ONCE + i) * 64 + 2 * (word + OWN * member);
        if constexpr (Config::back)
          words[i][member] = exists && at < a.k ? load_two(x + at, a.k % 2 == 0, at + 1 < a.k) : 0;
        else words[i][member] = exists && at < a.k ? *reinterpret_cast<const u32*>(x + at) : 0;
      }
  };
  uint4* to = a.laid_out + (u64(column_tile) * a.depth_units * 4 * Config::tile_m + row) * 8 + (piece ^ (row & 7));
  u32 words[AT_ONCE][4], next[AT_ONCE][4];
  load(words, first);
  for (u32 step = first; step < last; step++) {
    if (step + 1 < last) load(next, step + 1);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      to[u64(step * AT_ONCE + i) * OF_TILE] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
#pragma unroll
      for (u32 member = 0; member < 4; member++) words[i][member] = next[i][member];
    }
  }
}
