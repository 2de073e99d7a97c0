// The kernel that runs ahead of `multiply` where x is laid out in memory: it writes x in the swizzled tiles that wgmma
// reads, with zeros beyond M and K. The includer has X_BYTES (of a unit), SPAN_WORDS and OWN (words of a span, and
// those of one lane of a quad); its Arguments are device/laid_out.cuh's.

#include "ptx.cuh"
#include "scale_rows.cuh"

// Blocks of 64 numbers that a thread lays out a piece of. With `grouped` it takes two loads to find its row of x.
constexpr u32 LAID_BLOCKS = Config::grouped ? 4 : 1;

// Prepares for `multiply`. For each CTA of that kernel one CTA here prefetches scales to L2; the others lay x [m, k]
// out as [tile of x][K / 64][tile_m rows][128 bytes, whose 16-byte pieces are swizzled by the row]. A word is two
// neighbouring k; piece j of a span holds word j of each of a quad's four lanes. With `grouped` a tile has the rows of
// x that pairs of one expert want. With `back` the order of k stays, and K may be odd.
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
  const u32 index = (blockIdx.x - ctas) * 128 + threadIdx.x,
            pieces = a.column_tiles * a.depth_units * (X_BYTES / 16) / LAID_BLOCKS;
  if (index >= pieces) return;
  const u32 piece = index % 8, row = index / 8 % Config::tile_m, first = index / (8 * Config::tile_m) * LAID_BLOCKS,
            blocks = a.depth_units * 4;
  u32 m = first / blocks * Config::tile_m + row;
  bool exists = m < a.m;
  if constexpr (Config::grouped) {
    const Tile tile = tile_of(a, first / blocks);
    if (row >= copied_rows(tile)) return;
    exists = row < tile.rows;
    m = tile.first + row;
    if (exists && a.m) m = pair_of(a, m) / a.m;
  }
  const u32 k = first % blocks * 64, word = piece / OWN * SPAN_WORDS + piece % OWN;
  u32 words[LAID_BLOCKS][4];
#pragma unroll
  for (u32 i = 0; i < LAID_BLOCKS; i++)
#pragma unroll
    for (u32 member = 0; member < 4; member++) {
      const u32 at = k + 64 * i + 2 * (word + OWN * member);
      const u16* from = a.x + u64(m) * a.k + at;
      if constexpr (Config::back)
        words[i][member] = exists && at < a.k ? load_two(from, a.k % 2 == 0, at + 1 < a.k) : 0;
      else words[i][member] = exists && at < a.k ? *reinterpret_cast<const u32*>(from) : 0;
    }
#pragma unroll
  for (u32 i = 0; i < LAID_BLOCKS; i++)
    a.laid_out[(u64(first + i) * Config::tile_m + row) * 8 + (piece ^ (row & 7))] =
        make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
}
