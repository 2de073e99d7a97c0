// Stream-K with Hopper's wgmma: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]), W in 4 bits, any M.
//
// Bytes moved: W's nibbles and scales once for every tile_m rows of x; x and y are small beside them. Flops: 2 M N K.
//
// Operands. The kernel computes out.T = W @ x.T: W is the A operand and comes from registers, x is B and comes from
// shared memory. A register of A holds two neighbouring k of one row of W, which is one packed byte, so nothing is
// repacked. Within a span of weights that share a scale K may be permuted, as long as x is permuted alike: a thread
// takes neighbouring bytes of W, and x is laid out in that order. One look-up in a table in shared memory turns a byte
// into two 16-bit numbers (device/decode.cuh). The host multiplies the codebook by a factor that makes its rounding to
// 16 bits harmless, and the epilogue multiplies by one over that factor, `unit`. Scales are applied in fp32 to the sums
// of a span, or of JOINED spans that share one.
//
// Work. Tiles of TILE_N rows of W by tile_m rows of x are cut along K into units of UNIT_K, and every CTA takes an
// equal run of units (device/scheduler.cuh). One producer warpgroup copies W and x to shared memory and decodes scales;
// the others multiply, 16 rows of W a warp. CTAs that share a tile add their sums up in an order that the shape decides
// (device/split_k.cuh), in the cluster that they form, or through memory. The same input gives the same bits.
//
// Experts. With `grouped` x are rows of tokens, gathered by expert, and a tile has pairs of a token and one expert.
// What tiles there are is read on the device, and each is one CTA's from end to end (device/grouped.cuh). Of gate and
// up only activation(gate) * up is stored.
//
// x. The kernel `lay_out` writes x in the swizzled tiles that wgmma reads, with zeros beyond M and K; `multiply` may
// start before it is done (programmatic dependent launch). Where all units of a CTA belong to one tile and shared
// memory has room for their x, the CTA lays it out itself and keeps it there. No other kernel runs first then.
//
// Needs sm_90a, K % span == 0, packed aligned to 16 bytes, and units times CTAs below 2^32.
//
// Config:
//   tile_m, warpgroups, stages, cluster      rows of x a tile, warpgroups that multiply, stages of the pipeline, CTAs
//   resident                                 units whose x stays in shared memory; 0: x comes with W
//   shares                                   CTAs that have equal parts of each tile, and end with it together; 1: any
//   direct                                   the most parts of a tile that its first CTA adds up one by one
//   span, log_block                          weights summed before they are scaled, 64 or 32; log2 of the block size
//   loads                                    how a thread loads the scales of a row of W (device/scale_rows.cuh)
//   x, scale, low_first                      types, and whether the first weight of a byte is in its low half
//   activation, residual, norm               what y is combined with, and x put through (device/laid_out.cuh)
//   next_tile_m, next_span                   of a pair whose result is laid out for the product that reads it: that
//                                            one's tile_m and span (device/laid_out.cuh)
//   grouped, wide, scatters                  of experts, whose `activation` is what gates: results are fp32; they go to
//                                            their pairs' rows
//   parts, paired                            weights that one launch multiplies with; they are gate and up, of which
//                                            every tile has the same rows (device/laid_out.cuh)
//   registers                                of a thread at the start; producer_registers, consumer_registers: later
//   shared_bytes                             dynamic shared memory

#include "fetch.cuh"

// Below the sizes, which it reads.
#include "device/row_place.cuh"

// Below Arguments, which they read.
#include "device/lay_out.cuh"
#include "device/pairs.cuh"

// Whether words of W are loaded a span before they are decoded. Four warpgroups have no registers for them, nor do
// the widest tiles. Experts, whose tiles end after fewer units, are slower for it.
constexpr bool WORDS_AHEAD =
    !Config::grouped && Config::warpgroups < 4 && Config::tile_m <= (Config::warpgroups == 3 ? 80 : 96);

// This thread's bytes of W of a span: of its upper row, and of its lower. stage: the address of the stage.
using SpanWords = u32[2][WORDS];
__device__ __forceinline__ void load_span(SpanWords& words, u32 stage, const RowPlace& mine, int span) {
#pragma unroll
  for (int half = 0; half < 2; half++)
    load(words[half], stage + ((half ? mine.lower : mine.upper) ^ span * (Config::span / 2)));
}
// This thread's A operands of a span.
__device__ __forceinline__ void decode(u32 (&a)[4 * STEPS], const SpanWords& words, u32 column) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const u32 word = words[half][step / 2];
      a[4 * step + half] = step % 2 ? look_up<2>(word, column) : look_up<0>(word, column);
      a[4 * step + 2 + half] = step % 2 ? look_up<3>(word, column) : look_up<1>(word, column);
    }
}

__device__ __forceinline__ void multiply_units(const Arguments& a, const Arguments& up, u32 first, u32 last, u32 warp,
                                               u32 lane) {
  const u32 member = lane % 4, column = column_of(shared(), lane);
  const RowPlace mine(warp, lane);
  const u32 own_scales = scale_place(mine.scales);
  float total[SUMS];
  // Which groups of eight rows of x it stores: all, or its own where CTAs of a tile end with it together.
  const auto owns = [&](u32 i) {
    return Config::shares > 1 ? i % Config::shares == own_number(a) % Config::shares : is_own(i);
  };
  // Whether it has what the others of the tile have added to.
  const auto is_complete = [&](const WorkUnit& at) {
    if constexpr (Config::cluster > 1) {
      // Over W's stages, which are done with.
      cluster_reduce<WARPS>(total, a, at, shared() + TILES, shared() + SUMS_FULL, warp, lane);
    } else if constexpr (Config::shares > 1) {
      share_out<Config::shares, WARPS>(total, a, at, own_number(a), warp, lane);
    } else {
      return Config::grouped || fix_up<Config::direct, WARPS, 32>(total, a, at, own_number(a), warp, lane);
    }
    return true;
  };
  Ring ring(0);
  u32 resident = lower_half(BASE + X_RESIDENT);
  WorkUnit at(a, first);
  float sum[SUMS];
  u32 even[4 * STEPS], odd[4 * STEPS];  // A operands of two spans: one is multiplied while the next is decoded
  SpanWords words;                      // of the next span that is decoded
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i] = 0;
  wait(shared() + FULL, 0);
  //: the first stage is there
  load_span(words, shared() + TILES, mine, 0);
  decode(even, words, column);
  if constexpr (WORDS_AHEAD) load_span(words, shared() + TILES, mine, 1);
  Destination to;
  for (u32 unit = first; unit < last; unit++) {
    if constexpr (Config::grouped && Arguments::ASKS_AHEAD)
      if (at.depth == 0) to.find(a, at, first_row(at) + mine.row);
    const u32 stage = shared() + TILES + ring.at * STAGE_BYTES, scales = shared() + SCALE + ring.at * STAGE_SCALES;
    const u32 x = Config::resident ? resident : lower_half(stage + W_BYTES);
    resident += X_BYTES / 16;
    const u32 empty = shared() + EMPTY + 8 * ring.at;
    ring.next(Config::stages);
    auto turn = [&](const u32(&now)[4 * STEPS], u32(&next)[4 * STEPS], int span) __attribute__((always_inline)) {
      fence_registers();
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const u32 k = span * Config::span + step * 16;
        const u64 tile = descriptor(x + (k / 64 * (Config::tile_m * 128) + k % 64 * 2) / 16);
        multiply_add(sum, now[4 * step], now[4 * step + 1], now[4 * step + 2], now[4 * step + 3], tile,
                     step > 0 || span % JOINED > 0);
      }
      close_products();
      const bool ends = span % JOINED == JOINED - 1;
      const uint2 scale = ends ? load_pair(own_scales + scales + span / JOINED * SPAN_SCALES) : make_uint2(0, 0);
      // Words are loaded right before they are decoded, or a span ahead, so that no product waits for shared memory.
      constexpr int AHEAD = WORDS_AHEAD ? 2 : 1;
      if (WORDS_AHEAD && (span + 1 < SPANS || unit + 1 < last)) decode(next, words, column);
      if (span + AHEAD < SPANS) {
        load_span(words, stage, mine, span + AHEAD);
      } else if (unit + 1 < last) {
        if (span + AHEAD == SPANS) wait(shared() + FULL + 8 * ring.at, ring.parity);
        load_span(words, shared() + TILES + ring.at * STAGE_BYTES, mine, span + AHEAD - SPANS);
      }
      if (!WORDS_AHEAD && (span + 1 < SPANS || unit + 1 < last)) decode(next, words, column);
      wait_for_products<0>();
      if (ends) promote(total, sum, __uint_as_float(scale.x), __uint_as_float(scale.y));
    };
#pragma unroll
    for (int span = 0; span < SPANS; span += 2) turn(even, odd, span), turn(odd, even, span + 1);
    arrive(empty);
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      //: the last unit is multiplied
      const u32 row = first_row(at) + mine.row;
      Others others = {};
      if constexpr (COMBINES && OTHERS_FIRST)
        if (Config::cluster > 1 || Config::shares > 1 || unit - first >= at.depth)
          others = load_others(a, at, row, member, owns);
      if (is_complete(at)) {
        if constexpr (Config::grouped) {
          if constexpr (!Arguments::ASKS_AHEAD) to.find(a, at, row);
          store_pairs(a, total, to, at, row, member);
        } else if constexpr (Config::paired) store_gated(a, up, total, at, row, member, owns);
        else store_tile(a, total, OTHERS_FIRST ? others : load_others(a, at, row, member, owns), at, row, member, owns);
      }
      // All that the CTA has is a part of one tile; so nothing needs to be kept for another.
      if constexpr (Config::cluster > 1 || Config::shares > 1) return;
#pragma unroll
      for (int i = 0; i < SUMS; i++) total[i] = 0;
    }
    at.next(a);
  }
}

// Lays out x for units `first` to `last`, all of one tile, as `lay_out` would. A warp takes 8 rows of x by 64 of K.
__device__ __forceinline__ void lay_out_x(const Arguments& a, u32 first, u32 last, u32 warp, u32 lane) {
  constexpr u32 BATCH = Config::tile_m >= 32 || PRODUCERS_WAIT ? 8 : 4;  // loads in flight a lane, of two halves each
  const WorkUnit at(a, first);
  const u32 row = lane / 4, member = lane % 4, items = (last - first) * (UNIT_K / 64) * (Config::tile_m / 8);
  for (u32 item = warp; item < items; item += WARPS * BATCH) {
    uint4 words[BATCH][2];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++)
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 number = item + j * WARPS,
                  m = at.column_tile * Config::tile_m + number % (Config::tile_m / 8) * 8 + row;
        const u32 k = at.depth * UNIT_K + number / (Config::tile_m / 8) * 64 +
                      (Config::span == 64 ? member * 16 + half * 8 : half * 32 + member * 8);
        const bool exists = number < items && m < a.m && k < a.k;
        words[j][half] = exists ? *reinterpret_cast<const uint4*>(a.x + u64(m) * a.k + k) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      const u32 number = item + j * WARPS;
      if (number >= items) break;
      const u32 to = shared() + X_RESIDENT +
                     (number / (Config::tile_m / 8) * Config::tile_m + number % (Config::tile_m / 8) * 8 + row) * 128 +
                     member * 4;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 four[4] = {words[j][half].x, words[j][half].y, words[j][half].z, words[j][half].w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) store_word(to + (4 * half + i ^ row) * 16, four[i]);
      }
    }
  }
  publish_writes();
  sync_x();
}

extern "C" __global__ void __maxnreg__(Config::registers) multiply(const __grid_constant__ Launched launched) {
  const Arguments& a = part_of(launched, number_in_launch());
  if ((u32(__cvta_generic_to_shared(memory)) & 0xffffff) != BASE) __trap();
  const u32 first = first_unit(a, own_number(a)), last = end_unit(a, own_number(a)), lane = threadIdx.x % 32;
  if (Config::grouped && first == last) return wait_for_prior_kernel();  // what follows relies on it
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const Arguments& up = Config::paired ? launched.part[Config::parts - 1] : a;
  //: begins
  if (threadIdx.x == 0) prefetch_map(a.map);
  if (Config::paired && threadIdx.x == 0) prefetch_map(up.map);
  if (warp >= WARPS) {
    leave_registers<Config::producer_registers>();
    fetch(a, up, first, last, threadIdx.x - 128 * Config::warpgroups);
  } else {
    take_registers<Config::consumer_registers>();
    make_table<WARPS>(shared(), a.codebook, Config::low_first, warp, lane);
    sync_all();
    //: table and barriers are ready
    if constexpr (Config::resident > 0 || COMBINES) wait_for_prior_kernel();
    //: the kernel ahead is done, where it matters
    if constexpr (Config::resident > 0) {
      lay_out_x(a, first, last, warp, lane);
      //: x is there
    }
    multiply_units(a, up, first, last, warp, lane);
    //: ends
  }
}
