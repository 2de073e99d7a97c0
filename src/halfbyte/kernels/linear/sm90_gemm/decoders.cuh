// The way back with Config::decoders: one warpgroup or two that copy and decode, beside those that multiply.
//
// back.cuh's lane has many rows of W, each with a scale of its own, so all its look-ups are in shared memory, which the
// tensor cores then wait for; and a warp waits for its look-ups while its products are long done. Here the warps that
// bring W and x decode, too, and the others do nothing but multiply, with operands in shared memory.
//
// Of a turn, 64 rows of W, a warp has 16. A lane has half of a row, the 64 columns of one of the warpgroups that
// multiply: one scale or two. It keeps the scale's products with the codebook in registers (device/permuted_table.cuh)
// if weights are not computed, and stores weights, which wgmma transposes: rows of 128 bytes in 16-byte pieces that are
// swizzled by the row, with columns in the order of the MMA. Those of a warp that multiplies are 16, of which lanes
// have neighbours, so eight even ones come before eight odd ones. Lanes of the other half begin with the other 32
// columns: so eight lanes that store at once meet no bank twice.
//
// A stage has the x and the operands of a turn. It is full when x has come and four warps have decoded, and empty when
// the products are done. W comes by units, and its scales are asked for a unit ahead. Of two warpgroups each has every
// other turn: one warp alone issues half as many instructions as there is time for.

#include "device/permuted_table.cuh"
#include "fetch.cuh"

constexpr u32 TURN_OPERANDS = TILE_N * TURN_K * 2;  // bytes
constexpr int LANE_SCALES = 64 / Config::span;
constexpr u32 OWN_TURNS = TURNS / PRODUCERS, TURN_STRIDE = PRODUCERS * TURN_K;  // of a unit, a warpgroup's
static_assert(Config::decoders == 0 || (Config::back && Config::warpgroups == 2 && TURN_K == 64), "as above");

// Weights that share a scale: the first ones of four bytes two by two, and the second.
template <bool Computed> struct SpanNumbers {
  PermutedTable table;
  __device__ __forceinline__ SpanNumbers(const float (&codebook)[16], float scale)
      : table([&](int i) { return scaled(codebook[i], scale); }) {}
  __device__ __forceinline__ void apart(u32 bytes, u32 (&firsts)[2], u32 (&seconds)[2]) const {
    table.look_up_apart(bytes, firsts, seconds);
  }
};
template <> struct SpanNumbers<true> {
  u32 scales;  // it twice
  __device__ __forceinline__ SpanNumbers(const float (&)[16], float scale) : scales(__float_as_uint(scale)) {}
  __device__ __forceinline__ void apart(u32 bytes, u32 (&firsts)[2], u32 (&seconds)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 two = __byte_perm(bytes, 0, 0x0100 + i * 0x0202);  // the lower halves of 16 bits
      firsts[i] = fold(numbers_at<Config::low_first ? 0 : 4>(two), scales);
      seconds[i] = fold(numbers_at<Config::low_first ? 4 : 0>(two), scales);
    }
  }
};

// Scales as stored of a lane's part of a unit: of its row of each turn those of its columns, in the order in which it
// decodes them.
struct LaneScales {
  u32 bits[OWN_TURNS][LANE_SCALES];
  float absmax[OWN_TURNS][NESTED ? LANE_SCALES : 1];

  // before: rows of W before what the unit is of. row, column: the lane's first ones. half: which columns come first.
  __device__ __forceinline__ void load(const Arguments& a, u32 before, u32 row, u32 column, u32 half) {
    const u64 first = u64(before + row) * a.n + column;
#pragma unroll
    for (u32 turn = 0; turn < OWN_TURNS; turn++)
#pragma unroll
      for (u32 s = 0; s < LANE_SCALES; s++) {
        const u32 further = (s ^ half % LANE_SCALES) * Config::span;
        const bool exists = row + turn * TURN_STRIDE < a.k && column + further < a.n;
        const u64 block = (first + u64(turn * TURN_STRIDE) * a.n + further) >> Config::log_block;
        bits[turn][s] = exists ? u32(__ldg(static_cast<const ScaleBits*>(a.scale) + block)) : 0;
        if (NESTED) absmax[turn][s] = exists ? __ldg(a.absmax + (block >> 8)) : 0.0f;
      }
  }
};

// Of a turn, a half for each warpgroup that multiplies.
__device__ __forceinline__ u32 operands_at(u32 stage) { return shared() + stage * TURN_OPERANDS; }
// Eight columns.
__device__ __forceinline__ void store_eight(u32 to, const u32 (&eight)[2][2]) {
  store_four_words(to, make_uint4(eight[0][0], eight[0][1], eight[1][0], eight[1][1]));
}

// All that the CTA multiplies with. warp: among those of these warpgroups.
__device__ __forceinline__ void decode_units(const Arguments& a, const float (&codebook)[16], u32 first, u32 last,
                                             u32 warp, u32 lane) {
  const u32 group = warp / 4;
  if (warp == 0 && lane == 0) {
    for (u32 stage = 0; stage < Config::w_stages; stage++) {
      init(shared() + W_FULL + 8 * stage, 1);
      init(shared() + W_EMPTY + 8 * stage, 4 * PRODUCERS);
    }
    for (u32 stage = 0; stage < Config::x_stages; stage++) {
      init(shared() + X_FULL + 8 * stage, 1 + 4);  // copied bytes, and every warp's operands
      init(shared() + X_EMPTY + 8 * stage, WARPS);
    }
    publish_barriers();
  }
  __syncwarp();
  sync_all();
  // The kernel before may be the one that writes W; not so that of experts, which is another product of theirs.
  if constexpr (Config::copies_x && !Config::grouped) wait_for_prior_kernel();
  const bool brings_w = warp == 1, brings_x = warp % 4 == 0 && lane == 0;
  WorkUnit at(a, first), ahead(a, first);  // ahead: of what this warp brings
  Ring copied(1);
  u32 left = last - first;
  const auto fetch_w = [&] {
    if (left == 0) return;
    const u32 full = shared() + W_FULL + 8 * copied.at;
    wait(shared() + W_EMPTY + 8 * copied.at, copied.parity);
    if (lane == 0) {
      expect(full, W_BYTES);
      copy_w(shared() + W_AT + copied.at * W_BYTES, map_of(a), 0, ahead, full);
    }
    ahead.next(a), copied.next(Config::w_stages), left--;
  };
  if (brings_w)
    for (u32 i = 0; i < Config::w_stages; i++) fetch_w();
  const u32 half = lane % 2, own = warp % 4 * 16 + lane / 2;  // the lane's row of a turn
  LaneScales next;                                            // of the next unit
  const auto load_scales = [&] {
    next.load(a, first_of(a, at), at.depth * UNIT_K + group * TURN_K + own, first_row(at) + half * 64, half);
  };
  load_scales();
  const float offset = prepare_code<128 * PRODUCERS>(a, a, warp * 32 + lane);
  wait_for_prior_kernel();  // x is there, and the launch before last reads no more of what it left behind
  if constexpr (Config::grouped) launch_dependents();
  Clearing<128 * PRODUCERS> clearing(warp * 32 + lane);
  Ring w(0), stage(1);
  stage.at = group;
  const u32 to = half * (TURN_OPERANDS / 2) + own * 128, swizzle = (own ^ half * 4) % 8 * 16;
  for (u32 unit = first; unit < last; unit++) {
    float scales[OWN_TURNS][LANE_SCALES];
#pragma unroll
    for (u32 turn = 0; turn < OWN_TURNS; turn++)
#pragma unroll
      for (u32 s = 0; s < LANE_SCALES; s++)
        scales[turn][s] = decoded(next.bits[turn][s], next.absmax[turn][NESTED ? s : 0], shared() + CODE, offset);
    at.next(a);
    wait(shared() + W_FULL + 8 * w.at, w.parity);
    const u32 row_at = shared() + W_AT + w.at * W_BYTES + (group * TURN_K + own) * ROW_BYTES;
    uint4 words[2];  // of a turn; those of the other half begin with its second piece
    const auto load_words = [&](u32 turn) {
#pragma unroll
      for (u32 i = 0; i < 2; i++)
        words[i] =
            load_four_words(row_at + turn * (TURN_STRIDE * ROW_BYTES) + ((half * 2 + (i ^ half)) ^ lane / 4 & 3) * 16);
    };
    load_words(0);
#pragma unroll
    for (u32 turn = 0; turn < OWN_TURNS; turn++) {
      const u32 four[][4] = {{words[0].x, words[0].y, words[0].z, words[0].w},
                             {words[1].x, words[1].y, words[1].z, words[1].w}};
      if (turn + 1 < OWN_TURNS) load_words(turn + 1);
      const u32 full = shared() + X_FULL + 8 * stage.at;
      wait(shared() + X_EMPTY + 8 * stage.at, stage.parity);
      if (brings_x) copy_step(a, ahead, turn * PRODUCERS + group, shared() + X_AT + stage.at * X_STEP, full);
      if (turn == 1 && brings_w && unit > first) fetch_w();
      const u32 operands = operands_at(stage.at) + to;
#pragma unroll
      for (u32 s = 0; s < LANE_SCALES; s++) {
        const SpanNumbers<COMPUTES> numbers(codebook, scales[turn][s]);
#pragma unroll
        for (u32 i = s * 2 / LANE_SCALES; i < (s + 1) * 2 / LANE_SCALES; i++)
#pragma unroll
          for (u32 j = 0; j < 2; j++) {  // sixteen columns, of a warp that multiplies
            u32 even[2][2], odd[2][2];
#pragma unroll
            for (u32 eight = 0; eight < 2; eight++) numbers.apart(four[i][2 * j + eight], even[eight], odd[eight]);
            const u32 place = i * 4 + j * 2;
            store_eight(operands + (place * 16 ^ swizzle), even);
            store_eight(operands + (place * 16 + 16 ^ swizzle), odd);
          }
      }
      publish_writes();
      __syncwarp();
      if (lane == 0) {
        arrive(full);
        if (turn + 1 == OWN_TURNS) arrive(shared() + W_EMPTY + 8 * w.at);
      }
      stage.skip(PRODUCERS, Config::x_stages);
      // Behind a fence, as that waits for loads, too.
      if (turn == 0 && unit + 1 < last) load_scales();
    }
    if (brings_x) ahead.next(a);
    w.next(Config::w_stages);
    clearing.step(a);
  }
  clearing.finish(a);
}
