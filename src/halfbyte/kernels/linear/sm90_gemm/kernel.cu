// Many rows of x with Hopper's wgmma: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]), W in 4 bits.
//
// Bytes moved: W's nibbles and scales once for every tile_m rows of x, x once for every TILE_N rows of W, mostly from
// L2. Flops: 2 M N K, which is what bounds it from some 150 rows on.
//
// Operands. The kernel computes out.T = W @ x.T: W is the A operand and comes from registers, x is B and comes from
// shared memory. A register of A holds two neighbouring k of one row of W, which is one packed byte. K is permuted, and
// x is laid out alike (device/lay_out.cuh), so a thread takes neighbouring bytes of W (device/row_place.cuh). A number
// of the codebook times the scale, in fp32, and rounded once to 16 bits is the weight that dequantize gives, bit for
// bit, so nothing is left to do for the sums. Even rows of W look the codebook up in shared memory
// (device/wide_table.cuh), odd ones may look its products with the scale up in registers (device/permuted_table.cuh).
// Where a format's numbers and its scales are numbers of the type of x, weights are computed in that type instead
// (device/computed.cuh), and rounded once, too.
//
// Work. Tiles of TILE_N rows of W by tile_m rows of x are cut along K into units of UNIT_K, and every CTA takes an
// equal run of units (device/scheduler.cuh). One producer warpgroup copies W by units and x by steps of 64, and
// decodes scales. The others multiply, 16 rows of W a warp: while the tensor cores work on one turn, of turn_k, a warp
// decodes the next. CTAs that share a tile add their sums by the split-K fix-up, always in the order of K. Or they have
// equal parts of it, and each adds up some rows of x. Or runs are dealt out to clusters, each in one tile: a cluster's
// CTAs share its run and add up among themselves first (device/split_k.cuh).
//
// Twins. Two CTAs of a cluster may have the same run, of neighbouring tiles of W. Each copies half of a step's x to
// both, so L2 gives it out half as often. Mates have the same run, of neighbouring tiles of x, and decode for each
// other (mates.cuh). Or the producers decode (decoders.cuh).
//
// Experts. With `grouped` x are rows of tokens, gathered by expert, and a tile has pairs of a token and one expert.
// What tiles there are is read on the device, and each is one CTA's from end to end (device/grouped.cuh). Of gate and
// up only activation(gate) * up is stored.
//
// The way back. With `back` the same loop multiplies with W transposed (back.cuh), be it one weight or experts.
//
// Needs sm_90a, K % span == 0, packed aligned to 16 bytes, and units times CTAs below 2^32.
//
// Config:
//   tile_m, warpgroups, cluster              rows of x a tile, warpgroups that multiply, CTAs that share a run
//   shares                                   CTAs that have equal parts of each tile, and end with it together; 1: any
//   twins                                    2: CTAs go in pairs, with tiles of the same rows of x; 1: each by itself
//   mates                                    2: of `back`, they go in pairs with the same tile of W
//   decoders                                 of `back`, warpgroups that bring all and decode; 0: others decode
//   w_stages, x_stages                       units of W and steps of x on their way
//   direct                                   the most parts of a tile that its first CTA adds up one by one
//   numbers                                  how nibbles become numbers
//   permutes                                 odd rows of W are looked up in registers
//   lane_spans                               in every unit each lane of a quad has a span of its own
//   in_order                                 x keeps the order of K
//   turn_k                                   of K, what is decoded and multiplied at a time: 32, 64 or 128
//   span, log_block                          weights that share a scale, 64 or 32; log2 of the block size
//   loads                                    how a thread loads the scales of a row of W (device/scale_rows.cuh)
//   x, scale, low_first, flushes             types; whether the first weight of a byte is in its low half; whether
//                                            subnormal weights count as zero
//   back, copies_x                           the result is dy @ W; x is copied as it is, not laid out
//   grouped, activation                      of experts; what gates
//   quarter, half, three_quarters            of a tile's columns, as instructions have them: for tiles with few pairs
//   orders, wide, scatters                   results are in the order of the next product's x; are fp32; go to
//                                            their pairs' rows
//   parts, paired                            weights that one launch multiplies with; they are gate and up, of which
//                                            every tile has the same rows (device/laid_out.cuh)
//   producer_registers, consumer_registers   of a thread; shared_bytes: dynamic shared memory

#include "decode.cuh"
#include "fetch.cuh"

// Below Arguments, which they read.
#include "device/lay_out.cuh"
#include "device/pairs.cuh"

// Operands that wgmma finds in shared memory, and transposes.
struct SharedOperands {
  u32 at;
};
// Operands of 16 of K of a turn, number i, by columns of x.
template <int Sums>
__device__ __forceinline__ void multiply_16(float (&sums)[Sums], const u32 (&now)[OPERANDS], int i, u64 x_at,
                                            bool adds) {
  multiply_add(sums, now[4 * i], now[4 * i + 1], now[4 * i + 2], now[4 * i + 3], x_at, adds);
}
template <int Sums>
__device__ __forceinline__ void multiply_16(float (&sums)[Sums], const SharedOperands& now, int i, u64 x_at,
                                            bool adds) {
  multiply_add_at(sums, descriptor(lower_half(now.at) + i * (16 * 128 / 16)), x_at, adds);  // 16 rows of 128 bytes
}
// The operands of a turn by the first columns of x, as many as there are sums for; by half of them at a time where an
// instruction does not reach. tiles: where x is of each step. adds: to these sums.
template <int Sums, class Operands>
__device__ __forceinline__ void multiply_turn(float (&sums)[Sums], const Operands& now, const u32 (&tiles)[TURN_STEPS],
                                              bool adds) {
  constexpr int PARTS = Sums > sums_of(256) ? 2 : 1, PART = Sums / PARTS, IN_STEP = TURN_K / TURN_STEPS / 16;
#pragma unroll
  for (int i = 0; i < TURN_K / 16; i++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_16(reinterpret_cast<float (&)[PART]>(sums[part * PART]), now, i,
                  descriptor(tiles[i / IN_STEP] + part * (PART * 16) + i % IN_STEP * 2), i > 0 || adds);
  close_products();
}

// The same; of experts by no more columns than the tile's pairs take. The last tile of an expert often has few pairs.
// Full ones ask once.
template <class Operands>
__device__ __forceinline__ void multiply_columns(float (&total)[SUMS], const Operands& now,
                                                 const u32 (&tiles)[TURN_STEPS], bool adds, const StreamUnit&) {
  multiply_turn(total, now, tiles, adds);
}
__device__ constexpr int columns_of(int quarters) {
  constexpr int COLUMNS[] = {Config::quarter, Config::half, Config::three_quarters, Config::tile_m};
  return COLUMNS[quarters - 1];
}
template <int Quarters = 4, class Operands>
__device__ __forceinline__ void multiply_columns(float (&total)[SUMS], const Operands& now,
                                                 const u32 (&tiles)[TURN_STEPS], bool adds, const GroupedUnit& at) {
  if constexpr (Quarters > 1)
    if (at.tile.rows <= columns_of(Quarters - 1)) return multiply_columns<Quarters - 1>(total, now, tiles, adds, at);
  multiply_turn(reinterpret_cast<float (&)[sums_of(columns_of(Quarters))]>(total), now, tiles, adds);
}

#include "decoders.cuh"
#include "mates.cuh"  // below multiply_columns, which it calls

// All that the CTA has is a part of one tile; so nothing needs to be kept for another.
constexpr bool HAS_ONE_TILE = Config::cluster > 1 || Config::shares > 1;
// Adds up the sums of a tile, or the CTA's part of it, with those of others, and stores what is complete. own_row: the
// lane's first row of W in the tile.
__device__ __forceinline__ void end_tile(float (&total)[SUMS], const Arguments& a, const Arguments& up, Destination& to,
                                         const WorkUnit& at, u32 own_row, u32 warp, u32 lane) {
  const u32 row = first_row(at) + own_row, member = lane % 4;
  // In a cluster, and with equal shares, each CTA adds up and stores its own groups of eight rows of x.
  if constexpr (Config::cluster > 1)
    cluster_reduce<WARPS>(total, a, at, shared() + W_AT, shared() + SUMS_FULL, warp, lane);
  if constexpr (Config::shares > 1) share_out<Config::shares, WARPS>(total, a, at, own_number(a), warp, lane);
  const auto owns = [&](u32 i) {
    return Config::shares > 1 ? i % Config::shares == own_number(a) % Config::shares : is_own(i);
  };
  if constexpr (Config::grouped) {
    if constexpr (!Arguments::ASKS_AHEAD) to.find(a, at, row);
    store_pairs(a, total, to, at, row, member);
  } else if (Config::shares > 1 || fix_up<Config::direct, WARPS>(total, a, at, own_number(a), warp, lane)) {
    if constexpr (Config::paired) store_gated(a, up, total, at, row, member, owns);
    else store_tile(a, total, load_others(a, at, row, member, owns), at, row, member, owns);
  }
}

__device__ __forceinline__ void multiply_units(const Arguments& a, const Arguments& up, const float (&codebook)[16],
                                               u32 first, u32 last, u32 warp, u32 lane) {
  DecoderOf<Config::back>::Type decoder(warp, lane);
  const auto release = [&](u32 barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  // A twin's copies come here, too. For the last stages nobody waits, and the twin may have ended.
  u32 wanted = (last - first) * (UNIT_K / STEP_K) - Config::x_stages;  // stages that are filled anew, or below zero
  const auto release_x = [&](u32 barrier) {
    if constexpr (Config::twins == 1) return release(barrier);
    const bool is_wanted = int(wanted--) > 0;
    __syncwarp();
    if (is_wanted && lane < Config::twins) give_back_at(address_in(barrier, lane));
  };
  Ring w(0), x(0);
  WorkUnit at(a, first);
  float total[SUMS];
  // A operands of two turns: one is multiplied while the next is decoded. With ONE_AT_ONCE there are those of one, and
  // the other warpgroup multiplies meanwhile.
  u32 even[OPERANDS], odd[OPERANDS];
  u32 used[TURN_STEPS] = {};  // barriers of the stages of x that are multiplied; 0: none
  bool fresh = true;          // the tile's sums are zero
  wait(shared() + W_FULL, 0);
  //: the first stage is there
  decoder.load(shared() + W_AT, 0);
  decoder.decode(even, codebook, shared() + SCALE, 0);
  Destination to;
  for (u32 unit = first; unit < last; unit++) {
    if constexpr (Config::grouped && Arguments::ASKS_AHEAD)
      if (at.depth == 0) to.find(a, at, first_row(at) + decoder.row());
    const u32 stage = shared() + W_AT + w.at * W_BYTES, scales = shared() + SCALE + w.at * SCALE_BYTES;
    const u32 empty = shared() + W_EMPTY + 8 * w.at;
    w.next(Config::w_stages);
    auto turn = [&](const u32(&now)[OPERANDS], u32(&next)[OPERANDS], int number) __attribute__((always_inline)) {
      const bool begins = number % STEP_TURNS == 0, ends = (number + 1) % STEP_TURNS == 0;  // a step
      u32 tiles[TURN_STEPS], empties[TURN_STEPS];
#pragma unroll
      for (int s = 0; s < TURN_STEPS; s++) {
        if (begins) wait(shared() + X_FULL + 8 * x.at, x.parity);
        tiles[s] = lower_half(shared() + X_AT + x.at * X_STEP) + number % STEP_TURNS * (TURN_K * 2 / 16);
        empties[s] = shared() + X_EMPTY + 8 * x.at;
        if (ends) x.next(Config::x_stages);
      }
      fence_registers();
      multiply_columns(total, now, tiles, number > 0 || !fresh, at);
      // All of W's stage is in operands by now. Before, reads may still be on their way, and zeros for what is beyond K
      // are there at once: they come from no memory.
      if (number + 1 == TURNS) release(empty);
      const bool same = number + 1 < TURNS;  // unit that the next turn is of
      const auto load_next = [&] {
        if (!same && unit + 1 == last) return;
        if (!same) wait(shared() + W_FULL + 8 * w.at, w.parity);
        decoder.load(same ? stage : shared() + W_AT + w.at * W_BYTES, same ? number + 1 : 0);
      };
      if constexpr (Config::back) load_next();
      // The turn before is done: its operands make room for the next, and if it ended a step, its stages of x are free.
      wait_for_products<ONE_AT_ONCE ? 0 : 1>();
#pragma unroll
      for (int s = 0; s < TURN_STEPS; s++) {
        if constexpr (ONE_AT_ONCE) {
          release_x(empties[s]);
        } else {
          if (begins && used[s]) release_x(used[s]);
          if (ends) used[s] = empties[s];
        }
      }
      if constexpr (!Config::back) load_next();  // W may come late, and products go on meanwhile
      if (same) decoder.decode(next, codebook, scales, number + 1);
      else if (unit + 1 < last) decoder.decode(next, codebook, shared() + SCALE + w.at * SCALE_BYTES, 0);
    };
    if constexpr (ONE_AT_ONCE) turn(even, even, 0), turn(even, even, 1), turn(even, even, 2), turn(even, even, 3);
    else turn(even, odd, 0), turn(odd, even, 1);
    if constexpr (TURNS > 2 && !ONE_AT_ONCE) turn(even, odd, 2), turn(odd, even, 3);
    if constexpr (TURNS == 8) turn(even, odd, 4), turn(odd, even, 5), turn(even, odd, 6), turn(odd, even, 7);
    fresh = false;
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      wait_for_products<0>();
#pragma unroll
      for (u32& stage : used) {
        if constexpr (!ONE_AT_ONCE) release_x(stage);
        stage = 0;
      }
      end_tile(total, a, up, to, at, decoder.row(), warp, lane);
      if constexpr (HAS_ONE_TILE) return;
      fresh = true;
    }
    at.next(a);
  }
}

// The same of mates.
__device__ __forceinline__ void multiply_by_mates(const Arguments& a, const float (&codebook)[16], u32 first, u32 last,
                                                  u32 warp, u32 lane) {
  Mates mates(warp, lane);
  WorkUnit at(a, first);
  float total[SUMS];
  bool fresh = true;
  Destination to;
  mates.begin(codebook);
  for (u32 unit = first; unit < last; unit++) {
    mates.multiply(total, codebook, at, fresh, unit + 1 == last);
    fresh = false;
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      mates.finish();
      end_tile(total, a, a, to, at, mates.row(), warp, lane);
      if constexpr (HAS_ONE_TILE) return;
      fresh = true;
    }
    at.next(a);
  }
}

// The same of what others decode.
__device__ __forceinline__ void multiply_decoded(const Arguments& a, u32 first, u32 last, u32 warp, u32 lane) {
  const u32 own_row = warp * 16 + lane / 4 * 2;
  Ring stage(0);
  WorkUnit at(a, first);
  float total[SUMS];
  u32 used = 0;  // the barrier of what is multiplied; 0: nothing
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) arrive(used);
  };
  bool fresh = true;  // the tile's sums are zero
  Destination to;
  for (u32 unit = first; unit < last; unit++) {
    if constexpr (Config::grouped && Arguments::ASKS_AHEAD)
      if (at.depth == 0) to.find(a, at, first_row(at) + own_row);
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
      wait(shared() + X_FULL + 8 * stage.at, stage.parity);
      const u32 tiles[TURN_STEPS] = {lower_half(shared() + X_AT + stage.at * X_STEP)};
      fence_registers();
      multiply_columns(total, SharedOperands{operands_at(stage.at) + warp / 4 * (TURN_OPERANDS / 2)}, tiles,
                       turn > 0 || !fresh, at);
      wait_for_products<1>();
      if (turn > 0 || used) release();
      used = shared() + X_EMPTY + 8 * stage.at;
      stage.next(Config::x_stages);
    }
    fresh = false;
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      wait_for_products<0>();
      release();
      used = 0;
      end_tile(total, a, a, to, at, own_row, warp, lane);
      if constexpr (HAS_ONE_TILE) return;
      fresh = true;
    }
    at.next(a);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply(const __grid_constant__ Launched launched) {
  const Arguments& a = part_of(launched, number_in_launch());
  if ((u32(__cvta_generic_to_shared(memory)) & 0xffffff) != BASE) __trap();
  u32 first = first_unit(a, own_number(a)), last = end_unit(a, own_number(a));
  if constexpr (Config::cluster > 1) {  // each CTA has a part of the cluster's run, which is of one tile
    const u32 units = last - first;
    last = first + units * (own_rank() + 1) / Config::cluster, first += units * own_rank() / Config::cluster;
  }
  const u32 lane = threadIdx.x % 32;
  if (Config::grouped && first == last) return wait_for_prior_kernel();  // what follows relies on it
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const Arguments& up = Config::paired ? launched.part[Config::parts - 1] : a;
  //: begins
  if (threadIdx.x == 0) prefetch_map(a.map);
  if (Config::paired && threadIdx.x == 0) prefetch_map(up.map);
  if (warp >= WARPS) {
    leave_registers<Config::producer_registers>();
    if constexpr (Config::decoders) decode_units(a, launched.part[0].codebook, first, last, warp - WARPS, lane);
    else fetch(a, up, first, last, warp - WARPS, lane);
    __syncwarp();                                       // of some warps one lane came alone
    if constexpr (Config::cluster > 1) meet_cluster();  // as in cluster_reduce
    if constexpr (IN_PAIRS) meet_cluster();             // none ends before the other has arrived
  } else {
    take_registers<Config::consumer_registers>();
    if constexpr (IN_PAIRS) arrive_cluster();
    const auto& codebook = launched.part[0].codebook;  // of all parts, and there at a place that is known
    if constexpr (!COMPUTES && Config::mates == 1 && !Config::decoders)
      make_wide_table<WARPS>(shared(), codebook, warp, lane);
    sync_all();
    //: table and barriers are ready
    if constexpr (Config::mates > 1) multiply_by_mates(a, codebook, first, last, warp, lane);
    else if constexpr (Config::decoders) multiply_decoded(a, first, last, warp, lane);
    else multiply_units(a, up, codebook, first, last, warp, lane);
    if constexpr (IN_PAIRS) meet_cluster();
    //: ends
  }
}
