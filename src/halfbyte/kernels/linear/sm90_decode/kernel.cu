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
// over that factor, `unit`. Integers may be computed instead. Scales are applied in fp32 to the sums of a block, or of
// `joined` blocks that share one. Where each 32 weights share one, which is a power of two, sums are of half a block.
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
// token and an expert, and load those of the next unit while they multiply, where slices are short enough to hold both.
// Results that will be added up are `wide`.
//
// Fusion. With `norm` the multiplying warps norm the x that they hold, with one rounding, while the first tile of W is
// on its way (norm.cuh). With `residual` y = residual + result_scale * product.
//
// Launch. The kernel may start while the one before it still runs (programmatic dependent launch): it builds its table
// and prefetches its first tiles to L2. Then it waits, since x and W may have been written just now, and only then lets
// the next kernel start: so whatever follows finds all that was written before this kernel. With `static_weights` the
// caller promises that no kernel just ahead writes W or the norm: tiles are copied at once, and only x and the residual
// are waited for; the next kernel, which may start at once too, waits for this one.
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
//   bulk_weights                 W comes without a tensor map, a tile's rows in one piece
//   computes                     weights are integers from -8 to 7, and computed instead of looked up
//   scale_blocks, joined         blocks of 64 weights that share a scale; blocks that are summed before they are scaled
//   x, scale, low_first, bias    types; the first weight of a byte is in its low half; there is a bias
//   norm, activation, residual   x is normed first; what gates the second of two weights; the result is added to this
//   static_weights               W was written long ago
//   experts, pairs, wide         of a stack, 0 for one weight; the most pairs; whether results are fp32
//   neighbours                   CTAs that take the tiles of a run in turn, of a stack
//   combines                     experts of a token, whose results are added up (combine.cuh); 0: they are not

#include "norm.cuh"
#include "produce.cuh"
#include "reduce.cuh"

// A lane's 8 bytes of each block of its two rows of W: side by side, or four in each half.
class Weights {
 public:
  uint2 upper, lower;  // of a block

  __device__ __forceinline__ Weights(const Arguments& a, u32 warp, u32 group, u32 member)
      : swaps(Config::bulk_weights && EXPONENTS && group >= 4), below(NEXT_ROW * row_bytes(a)) {
    const u32 row = upper_row(group);
    mine = Config::bulk_weights ? row * row_bytes(a) + place(warp, 0) * BLOCK_BYTES : row_at<Config::chunk>(row);
    mine ^= member * (8 / HALVES) ^ (swaps ? BLOCK_BYTES / 2 : 0);
  }
  // Block b of the warp's slice, in the stage at `stage`.
  __device__ __forceinline__ void load(u32 stage, u32 warp, int b) {
    if constexpr (Config::bulk_weights) {
      upper = load_eight(stage, mine + b * BLOCK_BYTES), lower = load_eight(stage, mine + b * BLOCK_BYTES + below);
    } else {
      const u32 number_of_chunk = (warp * STEP_SLICE + b % STEP_SLICE) * BLOCK_BYTES / Config::chunk;
      const u32 chunk = stage + number_of_chunk * (TILE_N * Config::chunk);
      const u32 inside = mine ^ b * BLOCK_BYTES % Config::chunk;
      upper = load_eight(chunk, inside), lower = load_eight(chunk, lower_at<Config::chunk>(inside));
    }
  }

 private:
  // Of eight rows that a bulk copy brings, four lie in banks of their own. So the others' halves are loaded in turn.
  bool swaps;
  u32 mine, below;

  __device__ __forceinline__ uint2 load_eight(u32 base, u32 at) const {
    if constexpr (!EXPONENTS) return load_pair(base + at);
    const u32 first = load_number(base + at), second = load_number(base + (at ^ BLOCK_BYTES / 2));
    return swaps ? make_uint2(second, first) : make_uint2(first, second);
  }
};
// Sums of a lane's two rows and a column.
__device__ __forceinline__ void store_rows(u32 at, float upper, float lower) {
  if constexpr (NEXT_ROW == 1) store_pair(at, upper, lower);
  else store_float(at, upper), store_float(at ^ NEXT_ROW / 4 * 16, lower);
}

constexpr bool HOLDS_NEXT = ROUTED && Config::slice <= 4;  // x of the next unit, beside that of this one
using XFragments = uint2[Config::m_tiles][Config::slice][4];
__device__ __forceinline__ void copy_fragments(XFragments& to, const XFragments& from) {
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++)
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[c][b][i] = from[c][b][i];
}

// Number J of four pairs of weights in a word. Integers are computed: those of nibbles J and J + 4, which one mask
// takes out. Others are looked up: those of byte J.
template <int J> __device__ __forceinline__ u32 weights_of(u32 word, u32 column) {
  if constexpr (!Config::computes) return look_up<J>(word, column);
  const u32 bits = J < 2 ? word : word >> 8;
  return J % 2 ? upper_integers(bits) : integers(bits);
}
// x of a word's pairs, which are loaded in the order of k.
__device__ __forceinline__ void arrange(uint2 (&x)[Config::m_tiles][Config::slice][4]) {
  if constexpr (!Config::computes) return;
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++)
#pragma unroll
    for (int b = 0; b < Config::slice; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint2 &first = x[c][b][2 * half], &second = x[c][b][2 * half + 1];
        const u32 even[2] = {__byte_perm(first.x, second.x, 0x5410), __byte_perm(first.y, second.y, 0x5410)};
        const u32 odd[2] = {__byte_perm(first.x, second.x, 0x7632), __byte_perm(first.y, second.y, 0x7632)};
        first = Config::low_first ? make_uint2(even[0], odd[0]) : make_uint2(odd[0], even[0]);
        second = Config::low_first ? make_uint2(even[1], odd[1]) : make_uint2(odd[1], even[1]);
      }
}

// A multiplying warp. ready: called when the first loads are in flight; returns when shared memory is ready.
template <class Ready>
__device__ __forceinline__ void multiply(const Arguments& a, u32 shared, u32 first_block, u32 warp, u32 lane,
                                         const float (&offsets)[Config::parts], const Ready& ready) {
  const u32 group = lane / 4, member = lane % 4, row_blocks = a.k / 64;
  const u32 column = column_of(shared, lane);
  Weights weights(a, warp, group, member);
  const ScaleDecoder scales_of_warp(shared, warp, lane);
  XFragments x, then;  // then: of the next unit, with HOLDS_NEXT
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
          const u64 at = u64(row) * a.k + block * 64 + eight_at(member, half);
          const uint4 both =
              wanted && block < row_blocks ? *reinterpret_cast<const uint4*>(a.x + at) : make_uint4(0, 0, 0, 0);
          to[c][b][2 * half] = make_uint2(both.x, both.y), to[c][b][2 * half + 1] = make_uint2(both.z, both.w);
        }
    }
  };
  if constexpr (!ROUTED) load_x(x, 0);
  if constexpr (Config::norm) normalize(a, shared, x, first_block, warp, lane);
  //: x is asked for, or normed
  ready();
  //: table and barriers are ready
  Ring ring(0), sums(1), scales(0);
  Walk walk(a, shared);
  if (ROUTED && walk.is_there()) load_x(x, walk.get().unit);
  arrange(x);
  for (; walk.is_there(); sums.next(Config::sum_buffers), scales.next(SCALE_STAGES)) {
    const Tile tile = walk.get();
    walk.next();
    const bool changes = ROUTED && walk.is_there() && walk.get().unit != tile.unit;
    if (HOLDS_NEXT && changes) load_x(then, walk.get().unit);
    float offset = offsets[0];
#pragma unroll
    for (int i = 1; i < Config::parts; i++) offset = tile.part == i ? offsets[i] : offset;
    wait(shared + FULL + 8 * ring.at, ring.parity);
    //: (first) a stage is there
    float total[Config::m_tiles][4] = {}, sum[Config::m_tiles][4];
#pragma unroll
    for (int b = 0; b < Config::slice; b++) {
      if (b > 0 && b % STEP_SLICE == 0) wait(shared + FULL + 8 * ring.at, ring.parity);
      weights.load(shared + TILES + ring.at * STAGE, warp, b);
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
#pragma unroll
        for (int c = 0; c < Config::m_tiles; c++)
          if (b % Config::joined == 0) sum[c][0] = sum[c][1] = sum[c][2] = sum[c][3] = 0;
#pragma unroll
        for (int step = half * 4 / HALVES; step < (half + 1) * 4 / HALVES; step++) {
          const u32 over = step < 2 ? weights.upper.x : weights.upper.y;
          const u32 under = step < 2 ? weights.lower.x : weights.lower.y;
          const u32 a0 = step % 2 ? weights_of<2>(over, column) : weights_of<0>(over, column);
          const u32 a2 = step % 2 ? weights_of<3>(over, column) : weights_of<1>(over, column);
          const u32 a1 = step % 2 ? weights_of<2>(under, column) : weights_of<0>(under, column);
          const u32 a3 = step % 2 ? weights_of<3>(under, column) : weights_of<1>(under, column);
#pragma unroll
          for (int c = 0; c < Config::m_tiles; c++) mma(sum[c], a0, a1, a2, a3, x[c][b][step].x, x[c][b][step].y);
        }
        if (b == 0 && half == 0)
          scales_of_warp.decode(a, shared, tile, first_block, Config::steps == 1 ? ring.at : scales.at, offset, lane);
        if (b % Config::joined == Config::joined - 1) {
          const float2 scale = scales_of_warp.of_block(b, half, group);
#pragma unroll
          for (int c = 0; c < Config::m_tiles; c++) promote(total[c], sum[c], scale.x, scale.y);
        }
      }
      if (b % STEP_SLICE == STEP_SLICE - 1) {
        arrive(shared + EMPTY + 8 * ring.at);
        ring.next(Config::stages);
      }
    }
    wait(shared + SUM_EMPTY + 8 * sums.at, sums.parity);
    const u32 row = upper_row((FEW_REGISTERS ? kept(lane) : lane) / 4);  // computed anew, where there are few
    const u32 to =
        shared + SUM + (sums.at * Config::warps + warp) * SUM_WARP + sum_at(2 * member, row / 4) + row % 4 * 4;
#pragma unroll
    for (int c = 0; c < Config::m_tiles; c++)
      if (first_row() + 8 * c + 2 * member < a.m) {
        store_rows(to + c * 512, total[c][0], total[c][2]);
        store_rows((to ^ 64) + c * 512, total[c][1], total[c][3]);  // the next column
      }
    arrive(shared + SUM_FULL + 8 * sums.at);
    //: (first) a tile is multiplied
    //: the last tile is multiplied
    if constexpr (HOLDS_NEXT) {
      if (changes) {
        then[0][0][0].x = kept(then[0][0][0].x);  // so that this stays a branch, and other tiles pay for no selections
        copy_fragments(x, then);
        arrange(x);
      }
    } else if (changes) {
      load_x(x, walk.get().unit);
      arrange(x);
    }
  }
}

__device__ __forceinline__ void init_barriers(u32 shared) {
  for (int s = 0; s < Config::stages; s++)
    init(shared + FULL + 8 * s, NESTED ? 33 : 1), init(shared + EMPTY + 8 * s, Config::warps * 32);
  for (int s = 0; s < Config::sum_buffers; s++)
    init(shared + SUM_FULL + 8 * s, Config::warps * 32), init(shared + SUM_EMPTY + 8 * s, Config::reducers * 32);
  for (int s = 0; s < (Config::cluster > 1 ? SLOTS : 0); s++)
    init(shared + SLOT_FULL + 8 * s, 1), init(shared + SLOT_EMPTY + 8 * s, Config::reducers);
  if constexpr (Config::norm && Config::cluster > 1)
    init(shared + SQUARES_FULL, 1), expect(shared + SQUARES_FULL, FOLDS_NORM && blockIdx.y > 0 ? 0 : SQUARES_BYTES);
  publish_barriers();
}

struct Codes {  // what a thread carries of the nested scales' codes, from memory to shared memory, and their offsets
  static constexpr u32 COUNT = NESTED * Config::parts * ((256 + PREPARING - 1) / PREPARING);
  float value[COUNT + 1], offset[Config::parts];
  __device__ __forceinline__ Codes(const Arguments& a, u32 thread) {
#pragma unroll
    for (int i = 0; i < Config::parts; i++) offset[i] = NESTED ? load_global(a.weight[i].offset) : 0.0f;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
      if (at(i, thread) < 256) value[i] = load_global(a.weight[i % Config::parts].code + at(i, thread));
  }
  __device__ __forceinline__ void store(u32 shared, u32 thread) const {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
      if (at(i, thread) < 256) store_float(shared + code_at(i % Config::parts, at(i, thread)), value[i]);
  }
  static __device__ __forceinline__ u32 at(u32 i, u32 thread) { return thread + i / Config::parts * PREPARING; }
  // At once, and not where the number is first used.
  static __device__ __forceinline__ float load_global(const float* from) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, Config::resident_ctas)
    decode(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = u32(__cvta_generic_to_shared(memory)), lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  if ((shared & 0xffffffu) != BASE) __trap();              // in a cluster the top byte is the CTA's rank
  //: begins
  const u32 first_block = blockIdx.y * BLOCKS;
  if (warp == Config::warps && lane == 0) init_barriers(shared);
  __syncwarp();
  // Nobody sends anything to a CTA that has not made its barriers; its own copies of W need not wait for others.
  if constexpr (Config::cluster > 1) arrive_cluster();

  const u32 thread = threadIdx.x - (warp > Config::warps ? 32 : 0);
  const u32 preparing = (blockIdx.y * gridDim.x + blockIdx.x) * PREPARING + thread;  // among those of all CTAs
  const bool prepares = warp != Config::warps && warp <= Config::warps + Config::reducers;
  const auto tabulate = [&] {
    if constexpr (!Config::computes)
      make_table<Config::warps + Config::reducers>(shared, a.codebook, Config::low_first, thread / 32, lane);
  };
  const auto prepare = [&] {
    if constexpr (Config::static_weights) {
      if (threadIdx.x == 0) launch_dependents();
      const Codes codes(a, thread);
      if (Config::norm && warp < Config::warps) prefetch_norm(a, first_block, warp, lane);
      tabulate();
      codes.store(shared, thread);
      if constexpr (Config::cluster > 1) wait_for_cluster();
      wait_for_prior_kernel();
      //: the kernel ahead is done
      if constexpr (TOP_K > 0) clear_stale(a, preparing, gridDim.x * gridDim.y * PREPARING);
      return codes;
    } else {
      tabulate();
      if constexpr (Config::cluster > 1) wait_for_cluster();
      wait_for_prior_kernel();
      if (threadIdx.x == 0) launch_dependents();
      if constexpr (TOP_K > 0) clear_stale(a, preparing, gridDim.x * gridDim.y * PREPARING);
      return Codes(a, thread);
    }
  };
  const auto sync_ready = [&](const Codes& codes) {
    if constexpr (!Config::static_weights) codes.store(shared, thread);
    sync_all();
  };
  if (warp < Config::warps) {
    if constexpr (Config::registers > 0) take_registers<Config::registers>();
    const Codes codes = prepare();
    multiply(a, shared, first_block, warp, lane, codes.offset, [&] { sync_ready(codes); });
  } else {
    // The instruction needs four warps, so there are some that do nothing else.
    if constexpr (Config::registers > 0) leave_registers<32>();
    if (warp == Config::warps) {
      if (lane < Config::parts && TENSOR_SCALES) prefetch_map(a.weight[lane].scale_map);
      if constexpr (!Config::static_weights) {
        if (!ROUTED && lane == 0) prefetch_first(a, first_block);
        wait_for_prior_kernel();
      }
      if constexpr (ROUTED) find_units(a, shared, lane);
      //: units are found
      produce(a, shared, first_block, lane);
      //: all of W is asked for
    } else if (prepares) {
      sync_ready(prepare());
      reduce(a, shared, warp - Config::warps - 1, lane);
      //: ends
    }
  }
  if constexpr (Config::cluster > 1) {  // a CTA must not exit while a neighbour may still write to its barriers
    __syncwarp();
    if (!prepares) wait_for_cluster();
    meet_cluster();
  }
}
