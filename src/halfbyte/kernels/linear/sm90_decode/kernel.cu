// Decoding: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]) for up to 8 * m_tiles rows of x, W in 4 bits.
//
// Bytes moved: W's nibbles and scales once, K/2 + K/64 a row for nested blocks of 64; x and y are small beside them.
// Flops: 2 M N K.
//
// Operands. The kernel computes out.T = W @ x.T: W is the A operand of mma.m16n8k16, and a register of A holds two
// neighbouring k of one row, which is one packed byte, so nothing is repacked. K may be permuted as long as x is
// permuted alike: a thread takes 8 neighbouring bytes of a block of 64 weights, a quad of lanes all 32, and 4 MMAs use
// them up. One look-up in a table in shared memory turns a byte into two 16-bit numbers (device/decode.cuh). The host
// multiplies the codebook by a factor that makes its rounding to 16 bits harmless, and the epilogue multiplies by one
// over that factor, `unit`. Scales are applied in fp32 to the sums of a block, or of `joined` blocks that share one.
// Those that are powers of two, one for 32 weights, are multiplied into the operand of the MMA instead, which is exact: a
// lane's 16 weights of a block share one.
//
// Work. A CTA owns warps * slice blocks of K and strides over tiles of 16 rows of W. A warp keeps its slice of x in
// registers throughout. A producer warp copies tiles into shared memory, `stages` of them, each by one tensor copy:
// issuing a copy takes 70 cycles, however small it is. One or two reducer warps add up what the multiplying warps leave
// in shared memory. No barrier in the main loop stops the whole CTA. Where K is longer than a CTA's share, the CTAs of
// a cluster lie side by side along K and send their sums to the first of them through distributed shared memory. Sums
// are always added in the same order, so the same input gives the same bits.
//
// A tile may come in `steps`, with all warps going through K side by side. A stage then holds a step, and two tiles'
// memory is refilled half by half; else it would wait for the slowest warp.
//
// One launch may take several weights of the same K and format (q, k and v of an attention): their tiles follow one
// another, a tile belongs to one weight, and all read the same x. Of a gated pair each tile of gate is followed by the
// same tile of up in the same CTA, and y = activation(gate) * up.
//
// Experts. A stack is one weight with the rows of all experts. Each CTA finds out which experts are wanted by which
// tokens (routes.cuh), and takes tiles of those alone (walk.cuh). Its warps then hold the x of up to eight pairs of a
// token and an expert, and load those of the next unit while they multiply. With `sums_experts` a token's results are
// weighted and added up here, in the order of its experts.
//
// Fusion. With `norm` the multiplying warps apply an RMS norm to the x that they hold, in fp32 and with one rounding,
// while the first tile of W is on its way (norm.cuh). With `residual` y = residual + result_scale * product.
//
// Launch. The kernel may start while the one before it still runs (programmatic dependent launch): it builds its table
// and prefetches its first tiles to L2. Then it waits, since x and W may have been written just now, and only then lets
// the next kernel start: so whatever follows finds all that was written before this kernel. With `static_weights` the
// caller promises that no kernel just ahead writes W: tiles are copied at once, and only x and the residual are waited
// for; the next kernel, which may start at once too, waits for this one.
//
// Scales come by tensor copy where those of a row fill a multiple of 16 bytes. Where they do not and a CTA has all of
// K, one bulk copy brings those of a whole tile (bulk_scales): 16 rows always fill a multiple of 16 bytes, and so do
// the 4, 8 or 12 of a last tile. Where a CTA has a part of K, a bulk copy a row brings the aligned window around its
// scales (window_scales).
//
// Needs sm_90, N % 4 == 0, packed and scales aligned to 16 bytes; plan.py says which K.
//
// Config:
//   m_tiles, warps, slice        groups of eight rows of x; warps that multiply; blocks of K a warp
//   stages, steps, first_stages  stages of the pipeline; steps a tile; stages asked for before the first is there
//   cluster, batches, parts      CTAs along K; CTAs along M, each with at least one row of x; weights of this launch
//   sum_buffers, reducers        buffers for the warps' sums; warps that add them up
//   registers                    of a multiplying thread, others having 32 (sm_90a, warps % 4 == 0); 0: all alike
//   resident_ctas, shared_bytes  CTAs that share a multiprocessor; dynamic shared memory
//   chunk, scale_chunk, padded   bytes a row that a copy brings, of W and of scales; whether K ends inside a CTA's part
//   bulk_scales, window_scales   how scales come, see above
//   scale_blocks, joined         blocks of 64 weights that share a scale; blocks that are summed before they are scaled
//   x, scale, low_first, bias    types; the first weight of a byte is in its low half; there is a bias
//   norm, activation, residual   x is normed first; what gates the second of two weights; the result is added to this
//   static_weights               W was written long ago
//   experts, pairs, sums_experts  of a stack, 0 for one weight; the most pairs; whether results are added up by token

#include "norm.cuh"
#include "scales.cuh"
#include "walk.cuh"

// The first chunk along K of a step of a tile.
__device__ __forceinline__ u32 chunk_of(u32 first_block, int step) {
  return (first_block + step * STEP_BLOCKS) * BLOCK_BYTES / Config::chunk;
}

// Tensor copies for the tile that begins at `row`: W from its chunk number `chunk` on, scales from byte `byte` on.
__device__ __forceinline__ void copy_weights(u32 to, const Weight& w, u32 row, u32 chunk, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3}], [%4];" ::
          "r"(to),
      "l"(w.map), "r"(row), "r"(chunk), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_scales(u32 to, const Weight& w, u32 row, u32 byte, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(w.scale_map), "r"(byte), "r"(row), "r"(barrier)
      : "memory");
}

// Prefetches the CTA's first tile to L2 while the kernel before still runs. That kernel may be the one that writes W:
// until it has ended W may be prefetched, but not read.
__device__ __forceinline__ void prefetch_first(const Arguments& a, u32 first_block) {
  const Walk walk(a, 0);
  if (!walk.is_there()) return;
  const Tile tile = walk.get();
#pragma unroll
  for (int step = 0; step < Config::steps; step++)
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {0, %1, %2}];" ::"l"(a.weight[tile.part].map),
                 "r"(tile.row), "r"(chunk_of(first_block, step))
                 : "memory");
}

// Pipeline barriers, table and codes are ready. The producer, which makes the barriers, comes here late, and so do the
// others: waiting for each other at the beginning took 0.5 us.
__device__ __forceinline__ void sync_all() { asm volatile("bar.sync 1, %0;" ::"n"(PREPARING + 32) : "memory"); }

// The producer warp: it asks for a tile as soon as a stage is empty. At the start all stages are, but it asks for
// first_stages only until the first is there: memory answers in any order, and the rest would delay what is needed
// first.
__device__ __forceinline__ void produce(const Arguments& a, u32 shared, u32 first_block, u32 lane) {
  const u32 row_blocks = a.k / 64;
  Ring ring(1), scales(0);
  bool alone = true;
  for (Walk walk(a, shared); walk.is_there(); walk.next(), scales.next(SCALE_STAGES)) {
    const Tile tile = walk.get();
    const Weight& w = a.weight[tile.part];
    const float* absmax = NESTED ? absmax_of(a, tile, first_block, lane) : nullptr;
#pragma unroll
    for (int step = 0; step < Config::steps; step++, ring.next(Config::stages)) {
      const u32 full = shared + FULL + 8 * ring.at, to = shared + SCALES + scales.at * SCALE_STAGE;
      if (alone && (ring.at == Config::first_stages || ring.parity == 0)) {
        __syncwarp();
        sync_all();
        alone = false;
        wait(shared + FULL, 0);
      }
      wait(shared + EMPTY + 8 * ring.at, ring.parity);
      if constexpr (!TENSOR_SCALES) {
        const u32 scale_bytes =
            (min(BLOCKS, row_blocks - first_block) + Config::scale_blocks - 1) / Config::scale_blocks * SCALE_SIZE;
        const u32 rows = min(TILE_N, a.n[tile.part] - tile.row);
        const u64 scale = (u64(tile.row + (Config::window_scales ? lane : 0)) * row_blocks + first_block) /
                          Config::scale_blocks * SCALE_SIZE;
        const u64 from = Config::window_scales ? scale & ~15ull : scale;
        const u32 some = Config::window_scales ? u32((scale + scale_bytes + 15 & ~15ull) - from) : rows * scale_bytes;
        const u32 all = Config::window_scales ? __reduce_add_sync(~0u, lane < rows ? some : 0) : some;
        if (lane == 0) expect(full, STAGE + (step == 0 ? all : 0));
        __syncwarp();
        if (step == 0 && lane < (Config::window_scales ? rows : 1))
          copy(to + lane * SCALE_ROW, w.scale + from, some, full);
      } else {
        if (lane == 0) expect(full, STAGE + (step == 0 ? SCALE_STAGE : 0));
        if (lane == 0 && step == 0)
#pragma unroll
          for (int i = 0; i < SCALE_COPIES; i++)
            copy_scales(to + i * TILE_N * Config::scale_chunk, w, tile.row,
                        first_block / Config::scale_blocks * SCALE_SIZE + i * Config::scale_chunk, full);
      }
      if (lane == 0) copy_weights(shared + TILES + ring.at * STAGE, w, tile.row, chunk_of(first_block, step), full);
      if constexpr (NESTED) {
        if (step == 0) copy_absmax(shared + ABSMAX + scales.at * 128 + lane * 4, absmax);
        arrive_after_copies(full);
      }
    }
  }
  __syncwarp();
  if (alone) sync_all();
}

using XFragments = uint2[Config::m_tiles][Config::slice][4];
__device__ __forceinline__ void copy_fragments(XFragments& to, const XFragments& from) {
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++)
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[c][b][i] = from[c][b][i];
}

// A multiplying warp. ready: called when the first loads are in flight; returns when shared memory is ready.
template <class Ready>
__device__ __forceinline__ void multiply(const Arguments& a, u32 shared, u32 first_block, u32 warp, u32 lane,
                                         const Ready& ready) {
  const u32 group = lane / 4, member = lane % 4, row_blocks = a.k / 64;
  const u32 column = column_of(shared, lane);
  // Where in a tile this lane's bytes of row 2 * group of W are; it has row 2 * group + 1 too.
  const u32 mine = row_at<Config::chunk>(2 * group) ^ member * 8;
  const ScaleDecoder scales_of_warp(shared, warp, lane);
  XFragments x, then;  // then: of the next unit, where there are several
  const auto load_x = [&](XFragments& to, u32 unit) {
#pragma unroll
    for (int c = 0; c < Config::m_tiles; c++) {
      const u32 pair = ROUTED ? pair_of(shared, unit, 8 * c + group) : 0;
      const u32 row = ROUTED ? pair / a.per_row : first_row() + 8 * c + group;
      const bool wanted = ROUTED ? pair != NOBODY : row < a.m;
#pragma unroll
      for (int b = 0; b < Config::slice; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 block = first_block + place(warp, b);
          const u64 at = u64(row) * a.k + block * 64 + member * 16 + half * 8;
          const uint4 both =
              wanted && block < row_blocks ? *reinterpret_cast<const uint4*>(a.x + at) : make_uint4(0, 0, 0, 0);
          to[c][b][2 * half] = make_uint2(both.x, both.y), to[c][b][2 * half + 1] = make_uint2(both.z, both.w);
        }
    }
  };
  if constexpr (!ROUTED) load_x(x, 0);
  if constexpr (Config::norm) normalize(a, shared, x, first_block, warp, lane);
  float offsets[Config::parts];
#pragma unroll
  for (int i = 0; i < Config::parts; i++) offsets[i] = NESTED ? *a.weight[i].offset : 0.0f;
  ready();
  Ring ring(0), sums(1), scales(0);
  Walk walk(a, shared);
  if (ROUTED && walk.is_there()) load_x(x, walk.get().unit);
  for (; walk.is_there(); sums.next(Config::sum_buffers), scales.next(SCALE_STAGES)) {
    const Tile tile = walk.get();
    walk.next();
    const bool changes = ROUTED && walk.is_there() && walk.get().unit != tile.unit;
    if (changes) load_x(then, walk.get().unit);
    float offset = offsets[0];
#pragma unroll
    for (int i = 1; i < Config::parts; i++) offset = tile.part == i ? offsets[i] : offset;
    wait(shared + FULL + 8 * ring.at, ring.parity);
    float total[Config::m_tiles][4] = {}, sum[Config::m_tiles][4];
#pragma unroll
    for (int b = 0; b < Config::slice; b++) {
      if (b > 0 && b % STEP_SLICE == 0) wait(shared + FULL + 8 * ring.at, ring.parity);
      const u32 number_of_chunk = (warp * STEP_SLICE + b % STEP_SLICE) * BLOCK_BYTES / Config::chunk;
      const u32 chunk = shared + TILES + ring.at * STAGE + number_of_chunk * (TILE_N * Config::chunk);
      const u32 inside = mine ^ b * BLOCK_BYTES % Config::chunk;
      const uint2 w = load_pair(chunk + inside), v = load_pair(chunk + row_after<Config::chunk>(inside));
      u32 upper = 0, lower = 0;  // factors of this lane's 16 weights of each row
      if constexpr (EXPONENTS) {
        const u32 slot = Config::steps == 1 ? ring.at : scales.at, byte = place(warp, b) * SCALE_SIZE + member / 2;
        if (!Config::padded || first_block + place(warp, b) < row_blocks) {
          upper = decode_exponent(load_byte(exponent_at(a, shared, tile, first_block, slot, 2 * group, byte)));
          lower = decode_exponent(load_byte(exponent_at(a, shared, tile, first_block, slot, 2 * group + 1, byte)));
        }
      }
#pragma unroll
      for (int c = 0; c < Config::m_tiles; c++)
        if (b % Config::joined == 0) sum[c][0] = sum[c][1] = sum[c][2] = sum[c][3] = 0;
#pragma unroll
      for (int step = 0; step < 4; step++) {
        const u32 over = step < 2 ? w.x : w.y, under = step < 2 ? v.x : v.y;
        u32 a0 = step % 2 ? look_up<2>(over, column) : look_up<0>(over, column);
        u32 a2 = step % 2 ? look_up<3>(over, column) : look_up<1>(over, column);
        u32 a1 = step % 2 ? look_up<2>(under, column) : look_up<0>(under, column);
        u32 a3 = step % 2 ? look_up<3>(under, column) : look_up<1>(under, column);
        if constexpr (EXPONENTS) a0 = fold(a0, upper), a2 = fold(a2, upper), a1 = fold(a1, lower), a3 = fold(a3, lower);
#pragma unroll
        for (int c = 0; c < Config::m_tiles; c++)
          mma(EXPONENTS ? total[c] : sum[c], a0, a1, a2, a3, x[c][b][step].x, x[c][b][step].y);
      }
      if (b == 0 && !EXPONENTS)
        scales_of_warp.decode(a, shared, tile, first_block, Config::steps == 1 ? ring.at : scales.at, offset, lane);
      if (b % Config::joined == Config::joined - 1 && !EXPONENTS) {
        const float2 scale = scales_of_warp.of_block(b, group);
#pragma unroll
        for (int c = 0; c < Config::m_tiles; c++) promote(total[c], sum[c], scale.x, scale.y);
      }
      if (b % STEP_SLICE == STEP_SLICE - 1) {
        arrive(shared + EMPTY + 8 * ring.at);
        ring.next(Config::stages);
      }
    }
    wait(shared + SUM_EMPTY + 8 * sums.at, sums.parity);
    const u32 to = shared + SUM + (sums.at * Config::warps + warp) * SUM_WARP;
#pragma unroll
    for (int c = 0; c < Config::m_tiles; c++)
      if (first_row() + 8 * c + 2 * member < a.m) {
        const u32 at = to + (8 * c + 2 * member) * SUM_COLUMN + 8 * group;
        store_pair(at, total[c][0], total[c][2]);
        store_pair(at + SUM_COLUMN, total[c][1], total[c][3]);
      }
    arrive(shared + SUM_FULL + 8 * sums.at);
    if (changes) copy_fragments(x, then);
  }
}

// Of experts: a tile's results, four rows of W by one pair a lane, into memory, or into what a token's sum is made of.
__device__ __forceinline__ void store_pairs(const Arguments& a, u32 shared, const Tile& tile, float4 v, u32 lane) {
  const u32 pair = pair_of(shared, tile.unit, lane / 4), row = tile.own + 4 * (lane % 4);
  const u32 kept = shared + GATE + 16 * lane;  // gate's, where this lane alone reads and writes
  v.x *= a.unit, v.y *= a.unit, v.z *= a.unit, v.w *= a.unit;
  if (Config::bias && a.result[0].bias) {
    const ushort4 b = *reinterpret_cast<const ushort4*>(a.result[0].bias + tile.row + 4 * (lane % 4));
    v.x += unpack(b.x), v.y += unpack(b.y), v.z += unpack(b.z), v.w += unpack(b.w);
  }
  if (pair == NOBODY) return;
  if constexpr (Config::sums_experts) {
    store_sums(shared + PAIR_RESULT + (pair * TILE_N + 4 * (lane % 4)) * 4, v);
  } else if constexpr (PAIRED) {
    if (tile.half == 0) store_sums(kept, v);
    else
      store_four(a.result[0].y + u64(pair) * (a.expert_rows / 2) + row, gated<Config::activation>(load_sums(kept), v));
  } else if constexpr (INTERLEAVED) {
    const u32 word = pack(gated<Config::activation>(v.x, v.y), gated<Config::activation>(v.z, v.w));
    *reinterpret_cast<u32*>(a.result[0].y + u64(pair) * (a.expert_rows / 2) + row / 2) = word;
  } else {
    store_four(a.result[0].y + u64(pair) * a.expert_rows + row, v);
  }
}

// The sums of all tokens for 16 rows of W from `own` on, each over its experts in the order in which it has them.
__device__ __forceinline__ void store_sums_of_tokens(const Arguments& a, u32 shared, u32 own, u32 lane) {
  __syncwarp();
  for (u32 i = lane; i < a.pairs / a.top_k * 4; i += 32) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (u32 pair = i / 4 * a.top_k; pair < (i / 4 + 1) * a.top_k; pair++) {
      if (!has_expert(shared, pair)) continue;
      const float share = a.narrow_shares ? unpack(reinterpret_cast<const u16*>(a.shares)[pair])
                                          : reinterpret_cast<const float*>(a.shares)[pair];
      const float4 v = load_sums(shared + PAIR_RESULT + (pair * TILE_N + i % 4 * 4) * 4);
      sum.x = fmaf(share, v.x, sum.x), sum.y = fmaf(share, v.y, sum.y);
      sum.z = fmaf(share, v.z, sum.z), sum.w = fmaf(share, v.w, sum.w);
    }
    store_four(a.result[0].y + u64(i / 4) * a.expert_rows + own + i % 4 * 4, sum);
  }
  __syncwarp();
}

__device__ __forceinline__ void reduce(const Arguments& a, u32 shared, u32 part, u32 lane) {
  constexpr int OWN = Config::m_tiles / Config::reducers;  // groups of eight columns
  const u32 rank = blockIdx.y, column = part * (8 * OWN) + lane / 4, four = lane % 4;
  Ring sums(0), slot(0);
  Walk walk(a, shared);
  if (Config::sums_experts && rank == 0 && !walk.has_units())
    for (u32 tile = blockIdx.x; tile < a.tiles; tile += gridDim.x) store_sums_of_tokens(a, shared, tile * TILE_N, lane);
  for (; walk.is_there(); walk.next(), sums.next(Config::sum_buffers), slot.next(SLOTS)) {
    wait(shared + SUM_FULL + 8 * sums.at, sums.parity);
    float4 total[OWN];
#pragma unroll
    for (int c = 0; c < OWN; c++) {
      total[c] = make_float4(0, 0, 0, 0);
      const u32 from = shared + SUM + sums.at * Config::warps * SUM_WARP + (8 * c + column) * SUM_COLUMN + 16 * four;
      if (first_row() + 8 * c + column < a.m)
#pragma unroll
        for (int w = 0; w < Config::warps; w++) {
          const float4 v = load_sums(from + w * SUM_WARP);
          total[c].x += v.x, total[c].y += v.y, total[c].z += v.z, total[c].w += v.w;
        }
    }
    arrive(shared + SUM_EMPTY + 8 * sums.at);

    if constexpr (Config::cluster > 1) {
      const u32 full = shared + SLOT_FULL + 8 * slot.at, empty = shared + SLOT_EMPTY + 8 * slot.at;
      const u32 place = shared + SLOT + slot.at * (Config::cluster - 1) * SENT + part * (OWN * 512) + 16 * lane;
      if (rank > 0) {
        wait(empty, slot.parity ^ 1);
        const u32 to = address_in(place + (rank - 1) * SENT, 0), barrier = address_in(full, 0);
#pragma unroll
        for (int c = 0; c < OWN; c++)
          if (first_row() + 8 * c + column < a.m)
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                    to + c * 512),
                "f"(total[c].x), "f"(total[c].y), "f"(total[c].z), "f"(total[c].w), "r"(barrier)
                : "memory");
        continue;
      }
      if (part == 0 && lane == 0)
        expect(full,
               min(max(a.m, first_row()) - first_row(), 8 * Config::m_tiles) * TILE_N * 4 * (Config::cluster - 1));
      wait(full, slot.parity);
#pragma unroll
      for (int other = 0; other < Config::cluster - 1; other++)
#pragma unroll
        for (int c = 0; c < OWN; c++)
          if (first_row() + 8 * c + column < a.m) {
            const float4 v = load_sums(place + other * SENT + c * 512);
            total[c].x += v.x, total[c].y += v.y, total[c].z += v.z, total[c].w += v.w;
          }
      __syncwarp();
      if (lane > 0 && lane < Config::cluster)
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(empty, lane))
                     : "memory");
    }

    const Tile tile = walk.get();
    if constexpr (ROUTED) {
      store_pairs(a, shared, tile, total[0], lane);
      if (Config::sums_experts && walk.ends_rows()) store_sums_of_tokens(a, shared, tile.own, lane);
      continue;
    }
    const Result &own = a.result[tile.part], &to = a.result[PAIRED ? 0 : tile.part];
    const u32 row = tile.row + 4 * four, n = a.n[tile.part];
    // Gate's, kept where this lane alone reads and writes.
    const u32 kept = shared + GATE + part * (OWN * 512) + 16 * lane;
#pragma unroll
    for (int c = 0; c < OWN; c++) {
      const u32 m = first_row() + 8 * c + column;
      if (m < a.m && row < n) {
        total[c].x *= a.unit, total[c].y *= a.unit, total[c].z *= a.unit, total[c].w *= a.unit;
        if (Config::bias && own.bias) {
          const ushort4 b = *reinterpret_cast<const ushort4*>(own.bias + row);
          total[c].x += unpack(b.x), total[c].y += unpack(b.y), total[c].z += unpack(b.z), total[c].w += unpack(b.w);
        }
        if constexpr (PAIRED) {
          if (tile.half == 0) {
            store_sums(kept + c * 512, total[c]);
            continue;
          }
          total[c] = gated<Config::activation>(load_sums(kept + c * 512), total[c]);
        }
        if constexpr (Config::residual) {
          const ushort4 r = *reinterpret_cast<const ushort4*>(a.residual + u64(m) * n + row);
          total[c].x = fmaf(a.result_scale, total[c].x, unpack(r.x));
          total[c].y = fmaf(a.result_scale, total[c].y, unpack(r.y));
          total[c].z = fmaf(a.result_scale, total[c].z, unpack(r.z));
          total[c].w = fmaf(a.result_scale, total[c].w, unpack(r.w));
        }
        store_four(to.y + u64(m) * n + row, total[c]);
      }
    }
  }
}

__device__ __forceinline__ void init_barriers(u32 shared) {
  for (int s = 0; s < Config::stages; s++)
    init(shared + FULL + 8 * s, NESTED ? 33 : 1), init(shared + EMPTY + 8 * s, Config::warps * 32);
  for (int s = 0; s < Config::sum_buffers; s++)
    init(shared + SUM_FULL + 8 * s, Config::warps * 32), init(shared + SUM_EMPTY + 8 * s, Config::reducers * 32);
  for (int s = 0; s < SLOTS; s++)
    init(shared + SLOT_FULL + 8 * s, 1), init(shared + SLOT_EMPTY + 8 * s, Config::reducers);
  if constexpr (Config::norm && Config::cluster > 1)
    init(shared + SQUARES_FULL, 1), expect(shared + SQUARES_FULL, SQUARES_BYTES);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

struct Codes {  // what a thread carries of the nested scales' codes, from memory to shared memory
  static constexpr u32 COUNT = NESTED * Config::parts * ((256 + PREPARING - 1) / PREPARING);
  float value[COUNT + 1];
  __device__ __forceinline__ Codes(const Arguments& a, u32 thread) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
      if (at(i, thread) < 256)
        asm volatile("ld.global.f32 %0, [%1];"
                     : "=f"(value[i])
                     : "l"(a.weight[i % Config::parts].code + at(i, thread)));
  }
  __device__ __forceinline__ void store(u32 shared, u32 thread) const {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
      if (at(i, thread) < 256) store_float(shared + CODE + 1024 * (i % Config::parts) + 4 * at(i, thread), value[i]);
  }
  static __device__ __forceinline__ u32 at(u32 i, u32 thread) { return thread + i / Config::parts * PREPARING; }
};

extern "C" __global__ void __launch_bounds__(THREADS, Config::resident_ctas)
    decode(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = u32(__cvta_generic_to_shared(memory)), lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  if ((shared & 0xffffffu) != BASE) __trap();              // in a cluster the top byte is the CTA's rank
  const u32 first_block = blockIdx.y * BLOCKS;
  if (warp == Config::warps && lane == 0) init_barriers(shared);
  __syncwarp();
  if (Config::cluster > 1) sync_cluster();

  const u32 thread = threadIdx.x - (warp > Config::warps ? 32 : 0);
  const auto prepare = [&] {
    if constexpr (Config::static_weights) {
      if (threadIdx.x == 0) launch_dependents();
      const Codes codes(a, thread);
      make_table<Config::warps + Config::reducers>(shared, a.codebook, Config::low_first, thread / 32, lane);
      wait_for_prior_kernel();
      return codes;
    } else {
      make_table<Config::warps + Config::reducers>(shared, a.codebook, Config::low_first, thread / 32, lane);
      wait_for_prior_kernel();
      if (threadIdx.x == 0) launch_dependents();
      return Codes(a, thread);
    }
  };
  const auto sync_ready = [&](const Codes& codes) {
    codes.store(shared, thread);
    sync_all();
  };
  if (warp < Config::warps) {
    if constexpr (Config::registers > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::registers));
    const Codes codes = prepare();
    multiply(a, shared, first_block, warp, lane, [&] { sync_ready(codes); });
  } else {
    // The instruction needs four warps, so there are some that do nothing else.
    if constexpr (Config::registers > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (warp == Config::warps) {
      if (lane < Config::parts && TENSOR_SCALES)
        asm volatile("prefetch.tensormap [%0];" ::"l"(a.weight[lane].scale_map) : "memory");
      if constexpr (!Config::static_weights) {
        if (!ROUTED && lane == 0) prefetch_first(a, first_block);
        wait_for_prior_kernel();
      }
      if constexpr (ROUTED) find_units(a, shared, lane);
      produce(a, shared, first_block, lane);
    } else if (warp <= Config::warps + Config::reducers) {
      sync_ready(prepare());
      reduce(a, shared, warp - Config::warps - 1, lane);
    }
  }
  if (Config::cluster > 1) {  // a CTA must not exit while a neighbour may still write to its barriers
    __syncwarp();
    sync_cluster();
  }
}
