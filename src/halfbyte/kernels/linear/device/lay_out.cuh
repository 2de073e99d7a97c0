// The kernel that runs ahead of `multiply` where x is laid out in memory: it writes x in the swizzled tiles that wgmma
// reads, with zeros beyond M and K. The includer has X_BYTES (of a unit), SPAN_WORDS and OWN (words of a span, and
// those of one lane of a quad), LANE_SPANS (row_place.cuh), LAYS_UNITS (a thread has many loads on their way, as there
// are threads enough), and `memory`, which is shared; its Arguments are device/laid_out.cuh's.

#include "ptx.cuh"
#include "rms_norm.cuh"
#include "scale_rows.cuh"

// Zeros for the results of pairs that have no expert. CTA `cta` of `ctas`: each of its warps takes a pair at a time.
__device__ __forceinline__ void clear_rows(const Arguments& a, u32 cta, u32 ctas) {
  const u32 lane = threadIdx.x % 32, pairs = count_pairs(a);
  for (u32 pair = cta * 4 + threadIdx.x / 32; pair < pairs; pair += ctas * 4) {
    if (place_of(a, pair) != NOWHERE) continue;
    u16* row = a.y + u64(pair) * a.n;
    if (a.n % 8 == 0)
      for (u32 i = lane; i < a.n / 8; i += 32) reinterpret_cast<uint4*>(row)[i] = make_uint4(0, 0, 0, 0);
    else
      for (u32 i = lane; i < a.n; i += 32) row[i] = 0;
  }
}

// What a thread does at a time, a step: a piece of 16 bytes of each of AT_ONCE blocks of 64 numbers; or, with
// LANE_SPANS, four pieces of a block of a unit, for which it reads 16 bytes of each of the lanes that they are for.
constexpr u32 AT_ONCE = LAYS_UNITS ? 4 : 1;
constexpr u32 OF_ROWS = 8 * Config::tile_m;  // pieces, from one block of a tile to the next
using Pieces = u32[AT_ONCE][4];

// The number, in its row, of the first word of a piece's member.
__device__ __forceinline__ u32 number_of(u32 block, u32 piece, u32 member) {
  if constexpr (LANE_SPANS) return block / 4 * 256 + member * 64 + (block % 4 ^ member) * 16 + 2 * piece;
  return block * 64 + 2 * (piece / OWN * SPAN_WORDS + piece % OWN + OWN * member);
}
// The threads of a warp that have the same row as this one.
__device__ __forceinline__ u32 of_same_row() { return 0xffu << (threadIdx.x & 24); }

// A thread's pieces of a row of x in a step, of which it is the `number`-th of eight threads; zeros beyond K, or if
// there is no such row. By all threads of the row.
__device__ __forceinline__ void load_pieces(Pieces& words, const Arguments& a, const u16* from, u32 row, u32 step,
                                            u32 number, bool exists) {
  const u16* x = from + u64(row) * a.k;
  if constexpr (LANE_SPANS) {
    const u32 block = 4 * step + number / 2, half = number % 2;
    uint4 of_members[4];
#pragma unroll
    for (u32 member = 0; member < 4; member++) {
      const u32 at = number_of(block, 4 * half, member);
      of_members[member] = exists && at < a.k ? *reinterpret_cast<const uint4*>(x + at) : make_uint4(0, 0, 0, 0);
    }
    // It has four pieces side by side, and its neighbour the other four. They exchange two, and have every other one,
    // so that both write to a sector at once.
#pragma unroll
    for (u32 member = 0; member < 4; member++) {
      const uint4 four = of_members[member];
      const u32 first = __shfl_xor_sync(of_same_row(), half ? four.x : four.y, 1),
                second = __shfl_xor_sync(of_same_row(), half ? four.z : four.w, 1);
      words[0][member] = half ? first : four.x, words[1][member] = half ? second : four.z;
      words[2][member] = half ? four.y : first, words[3][member] = half ? four.w : second;
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (u32 member = 0; member < 4; member++) {
        const u32 at = number_of(step * AT_ONCE + i, number, member);
        if constexpr (Config::back)
          words[i][member] = exists && at < a.k ? load_two(x + at, a.k % 2 == 0, at + 1 < a.k) : 0;
        else words[i][member] = exists && at < a.k ? *reinterpret_cast<const u32*>(x + at) : 0;
      }
  }
}
// To row `row` of a tile.
__device__ __forceinline__ void store_pieces(const Arguments& a, u32 column_tile, u32 row, u32 step, u32 number,
                                             const Pieces& words) {
  uint4* to = a.laid_out + (u64(column_tile) * a.depth_units * 4 * Config::tile_m + row) * 8;
#pragma unroll
  for (u32 i = 0; i < AT_ONCE; i++) {
    const u32 block = LANE_SPANS ? 4 * step + number / 2 : step * AT_ONCE + i;
    const u32 piece = LANE_SPANS ? 2 * i + number % 2 : number;
    to[u64(block) * OF_ROWS + (piece ^ row & 7)] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
  }
}
// Calls `store` with a thread's run of steps and what it has loaded for each: the next while this one is stored.
template <class Store>
__device__ __forceinline__ void for_each_step(const Arguments& a, u32 row, u32 piece, bool exists, u32 run, u32 runs,
                                              const Store& store) {
  const u32 steps = a.depth_units * (4 / AT_ONCE), of_run = (steps + runs - 1) / runs;
  const u32 first = run * of_run, last = min(first + of_run, steps);
  if (first >= last) return;
  Pieces words, next;
  load_pieces(words, a, a.x, row, first, piece, exists);
  for (u32 step = first; step < last; step++) {
    if (step + 1 < last) load_pieces(next, a, a.x, row, step + 1, piece, exists);
    store(step, words);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (u32 member = 0; member < 4; member++) words[i][member] = next[i][member];
  }
}

// Writes each row of x to where its pairs are in tiles, so that it is read once. Runs follow each other: at a time all
// rows are at the same blocks, which lie side by side in tiles.
__device__ __forceinline__ void scatter_rows(const Arguments& a, u32 thread, u32 threads) {
  const u32 rows = count_pairs(a) / a.m, steps = a.depth_units * (4 / AT_ONCE);
  const u32 runs = max(1u, min(steps, threads / (8 * rows)));
  const u32 piece = thread % 8, row = thread / 8 % rows, run = thread / 8 / rows;
  if (run >= runs) return;
  const auto place_of = [&](u32 pair) { return pair < a.m ? row_in_tiles(a, row * a.m + pair) : NOWHERE; };
  const u32 of_first = place_of(piece);  // behind a store nothing is known any more
  for_each_step(a, row, piece, true, run, runs, [&](u32 step, const Pieces& words) {
    for (u32 first = 0; first < a.m; first += 8) {
      const u32 mine = first ? place_of(first + piece) : of_first;
      for (u32 i = 0; i < min(8u, a.m - first); i++) {
        const u32 place = __shfl_sync(of_same_row(), mine, i, 8);
        if (place != NOWHERE) store_pieces(a, place / Config::tile_m, place % Config::tile_m, step, piece, words);
      }
    }
  });
}

// Of a row of x, by a CTA: what it is multiplied by. Threads leave their warps' sums in shared memory.
__device__ __forceinline__ float norm_factor(const Arguments& a, u32 m) {
  constexpr u32 AHEAD = 8;  // loads on their way before any is used, which is all of 8,192 numbers
  const u32 of_warps = u32(__cvta_generic_to_shared(memory));
  const uint4* x = reinterpret_cast<const uint4*>(a.x + u64(m) * a.k);
  float sum = 0;
  for (u32 first = threadIdx.x; first < a.k / 8; first += AHEAD * 128) {
    uint4 eight[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) eight[i] = first + i * 128 < a.k / 8 ? x[first + i * 128] : make_uint4(0, 0, 0, 0);
    load_together(eight, a.k >> 31);
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
      sum = square_sum(eight[i].w, square_sum(eight[i].z, square_sum(eight[i].y, square_sum(eight[i].x, sum))));
  }
#pragma unroll
  for (u32 other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (threadIdx.x % 32 == 0) store_float(of_warps + threadIdx.x / 32 * 4, sum);
  __syncthreads();
  const float4 sums = load_sums(of_warps);
  return rsqrtf((sums.x + sums.y + (sums.z + sums.w)) / float(a.k) + a.epsilon);
}
// Lays out every NORM_PARTS-th run of 128 pieces of row `number` of all tiles, normed, by a CTA, from run `part` on.
// The first is asked for together with the row, so that memory is waited for once.
constexpr u32 NORM_PARTS = 4;
__device__ __forceinline__ void lay_out_normed(const Arguments& a, u32 number, u32 part) {
  const u32 column_tile = number / Config::tile_m, row = number % Config::tile_m, pieces = a.depth_units * 32;
  const bool exists = number < a.m;  // rows of tiles follow one another
  Pieces words, weights;
  const auto load = [&](u32 i) {
    load_pieces(words, a, a.x, number, i / 8, i % 8, exists && i < pieces);
    load_pieces(weights, a, a.other, 0, i / 8, i % 8, exists && i < pieces);
  };
  u32 i = part * 128 + threadIdx.x;
  load(i);
  const float factor = exists ? norm_factor(a, number) : 0;
  while (i < pieces) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) words[0][j] = normed(words[0][j], weights[0][j], factor, a.norm_offset);
    store_pieces(a, column_tile, row, i / 8, i % 8, words);
    i += NORM_PARTS * 128;
    load(i);
  }
}

// Prepares for `multiply`. For each CTA of that kernel one CTA here prefetches scales to L2; the others lay x [m, k]
// out as [tile of x][K / 64][tile_m rows][128 bytes, whose 16-byte pieces are swizzled by the row]. A word is two
// neighbouring k; piece j of a span holds word j of each of a quad's four lanes, and with LANE_SPANS piece j of a step.
// With `grouped` a tile has the rows of x that pairs of one expert want. With `back` the order of k stays, and K may be
// odd.
//
// A thread has the same piece of a row in every block of a run of steps. The host says by the size of the grid how many
// runs a row has. With `norm` NORM_PARTS CTAs have a row, and each reads all of it.
extern "C" __global__ void __launch_bounds__(128) lay_out(const __grid_constant__ Launched launched) {
  if constexpr (Config::norm)
    if (threadIdx.x < launched.part[0].k / 64) prefetch_to_l2(launched.part[0].other + threadIdx.x * 64);
  //: begins to lay out
  // `multiply` waits for this kernel alone and reads W at once, so it may start only when all work before is done.
  wait_for_prior_kernel();
  //: the kernel ahead of it is done
  launch_dependents();
  const u32 ctas = count_ctas(launched);
  if (blockIdx.x < ctas) {
    const Arguments& a = part_of(launched, blockIdx.x);
    if constexpr (!Config::back) prefetch_scales(a, blockIdx.x - a.first_cta, threadIdx.x);
    if constexpr (Config::paired) prefetch_scales(launched.part[1], blockIdx.x, threadIdx.x);
    return;
  }
  const Arguments& a = launched.part[0];
  if constexpr (Config::norm) {
    lay_out_normed(a, (blockIdx.x - ctas) / NORM_PARTS, (blockIdx.x - ctas) % NORM_PARTS);
    //: a row is laid out
    return;
  }
  const u32 thread = (blockIdx.x - ctas) * 128 + threadIdx.x, threads = (gridDim.x - ctas) * 128;
  if constexpr (Config::scatters) clear_rows(a, blockIdx.x - ctas, gridDim.x - ctas);
  if constexpr (Config::grouped)
    if (a.m) {
      scatter_rows(a, thread, threads);
      //: rows are where their pairs are
      return;
    }
  const u32 runs = threads / (a.column_tiles * OF_ROWS), run = thread / OF_ROWS % runs;
  const u32 piece = thread % 8, row = thread / 8 % Config::tile_m, column_tile = thread / OF_ROWS / runs;
  if (column_tile >= a.column_tiles) return;
  u32 m = column_tile * Config::tile_m + row;
  bool exists = m < a.m;
  if constexpr (Config::grouped) {
    const Tile tile = tile_of(a, column_tile);
    if (row >= copied_rows(tile)) return;
    exists = row < tile.rows, m = tile.first + row;
  }
  for_each_step(a, m, piece, exists, run, runs,
                [&](u32 step, const Pieces& words) { store_pieces(a, column_tile, row, step, piece, words); });
  //: a piece is laid out
}
