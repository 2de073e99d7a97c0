// Stream-K with mma.sync and cp.async, for GPUs from sm_80 on: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]), W
// in 4 bits, any M.
//
// Bytes moved: W's nibbles and scales once for every TILE_M rows of x; x once for every TILE_N rows of W, from L2; y.
// Flops: 2 M N K.
//
// Operands. The kernel computes out.T = W @ x.T: W is the A operand of mma.m16n8k16, and a register of A holds two
// neighbouring k of one row, which is one packed byte, so nothing is repacked (device/mma.cuh). Within a span K may be
// permuted as long as x is permuted alike: each lane of a quad takes a quarter of a span, neighbouring bytes of W and
// neighbouring numbers of x, both by loads as wide as these are.
//
// A byte becomes two 16-bit numbers by one look-up in a table in shared memory, which has a copy for every lane: no
// bank conflicts. The host multiplies the codebook by a factor that makes its rounding to 16 bits harmless; one over
// that factor (`unit`) goes into the scale. Where the codebook is the integers from -8 to 7 (`arithmetic`) there is no
// table: a nibble becomes the last bits of a number whose unit in the last place is 1, from which that number is
// subtracted. Scales multiply the sums of a span in fp32. Where such integers have scales of the type of x and meet
// many columns, they are multiplied by them instead (`folds`): the MMA's operands are then the dequantized weights. A
// span always lies within one block.
//
// Work. Tiles of TILE_N rows of W by TILE_M rows of x are cut along K into units, and every CTA takes an equal run of
// units (device/scheduler.cuh). All warps copy: `stages` stages of W and x are on their way in a ring, past the ends of
// tiles too. A warp multiplies 16 * row_groups rows of W with all rows of x; the k_warps that share rows share the
// spans of each stage, and add up at a tile's end. CTAs that share a tile add up by the split-K fix-up
// (device/split_k.cuh). Sums are always added in the same order, so the same input gives the same bits. invariant.py
// says which plans make a row's bits independent of the other rows of x.
//
// Needs sm_80, K % span == 0, block_size % span == 0, packed and x aligned to 16 bytes, N * K / span below 2^32, and
// units times CTAs below 2^32; any M and N.
//
// Config:
//   row_groups, columns     groups of 16 rows of W, and of 8 rows of x, that a warp multiplies
//   n_warps, k_warps        warps side by side along W's rows; that share rows
//   tile_k, span, stages    numbers of K of a stage; that are summed before they are scaled; stages on their way
//   resident_ctas           CTAs that share a multiprocessor
//   arithmetic, low_first   how W is decoded; whether the first weight of a byte is in its low half
//   folds, crossed          scales multiply weights, not sums; which nibbles a register of W takes, see span.cuh
//   x, scale, mma_k         types; 16
//   direct                  the most parts of a tile that its first CTA adds up one by one
//   shared_bytes            dynamic shared memory

#include "fetch.cuh"
#include "span.cuh"
#include "sums.cuh"

// Makes the table and the code of scales, and clears the workspace for the next launch. Returns what is added to nested
// scales.
__device__ __forceinline__ float prepare(const Arguments& a, u32 warp, u32 lane) {
  if constexpr (!Config::arithmetic) {
    const float entry = a.codebook[lane % 16];
#pragma unroll 4
    for (u32 byte = warp; byte < 256; byte += WARPS) {
      const float high = __shfl_sync(~0u, entry, byte >> 4), low = __shfl_sync(~0u, entry, byte & 15);
      reinterpret_cast<u32*>(memory)[byte * 32 + lane] = Config::low_first ? pack(low, high) : pack(high, low);
    }
  }
  clear_stale<THREADS>(a);
  if constexpr (NESTED) {
    for (u32 i = threadIdx.x; i < 256; i += THREADS) reinterpret_cast<float*>(memory + TABLE_BYTES)[i] = a.code[i];
    return *a.offset;
  }
  return 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::resident_ctas)
    multiply(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const u32 n_warp = warp / Config::k_warps, k_warp = warp % Config::k_warps;
  const u32 row = n_warp * (16 * Config::row_groups) + 2 * group;  // of a tile, this lane's first
  const u32 first = first_unit(a, own_number()), last = first_unit(a, own_number() + 1);

  // The first stages set out, and the scales of the first unit.
  Copies copies(a, u32(__cvta_generic_to_shared(memory)) + STAGES, first, last);
#pragma unroll
  for (int i = 0; i < Config::stages - 1; i++) copies.send(a);
  WorkUnit at(a, first);
  UnitScales scales;
  const u32 scale_k = member / OWN_SPANS * TILE_K + (k_warp * OWN_SPANS + member % OWN_SPANS) * SPAN;
  if (first < last) scales.load(a, at, row, scale_k);

  const float offset = prepare(a, warp, lane);  // while they are under way
  __syncthreads();

  const Places places(row, lane);
  float total[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i] = 0;
  u32 slot = 0;
  for (u32 unit = first; unit < last; unit++) {
    Multiplier scale[2 * Config::row_groups];
#pragma unroll
    for (int i = 0; i < 2 * Config::row_groups; i++) scale[i] = multiplier(scales.decode(i, offset, a.unit));
    WorkUnit next = at;
    next.next(a);
    if (unit + 1 < last) scales.load(a, next, row, scale_k);
#pragma unroll 1  // what would be gained is lost again in fetching instructions
    for (u32 stage = 0; stage < UNIT_STAGES; stage++) {
      wait_for_groups<Config::stages - 2>();
      __syncthreads();  // the stage is there, and everybody is done with the one before, which is filled anew
      copies.send(a);
      const unsigned char* here = memory + STAGES + slot * STAGE_BYTES;
      if (++slot == Config::stages) slot = 0;
#pragma unroll(SUMS < 48 ? OWN_SPANS : 1)  // registers are for the sums
      for (u32 own = 0; own < OWN_SPANS; own++) {
        Multiplier of_span[2 * Config::row_groups];
#pragma unroll
        for (int i = 0; i < 2 * Config::row_groups; i++)
          of_span[i] = __shfl_sync(~0u, scale[i], lane & ~3u | stage * OWN_SPANS + own);
        multiply_span(total, of_span, here, k_warp * OWN_SPANS + own, places);
      }
    }
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      add_up(total, n_warp, k_warp, lane);
      if (k_warp == 0 && fix_up<Config::direct, Config::n_warps>(total, a, at, own_number(), n_warp, lane))
        store(a, total, at, row, member);
#pragma unroll
      for (int i = 0; i < SUMS; i++) total[i] = 0;
    }
    at.next(a);
  }
}
