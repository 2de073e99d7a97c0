// Many rows of x with mma.sync and cp.async, for GPUs from sm_80 on, forward and back, W in 4 bits:
//
//   forward   y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n])
//   back      y[m, k] = sum over n of x[m, n] * W[n, k]
//
// Bytes moved: W's nibbles and scales once for every TILE_M rows of x; x once for every TILE_W produced numbers, from
// L2; y. Flops: 2 M N K.
//
// sm80 decodes a weight in the warp that multiplies it, for at most 64 rows of x. Here a CTA decodes a tile of W once,
// for all of its rows of x, to shared memory, and from there on it is a product of 16-bit matrices: ldmatrix gives each
// warp operands of 64 produced numbers by 8 * columns rows of x, 16 summed numbers at a time. Decoding of the next tile
// stands between the MMAs of this one; the two take turns in two buffers, with one barrier a stage.
//
// The MMA computes out.T: W is its A operand, and the way back is the same loop with matrices that ldmatrix transposes.
// Operands are the dequantized weights, rounded once, as dequantize does it.
//
// Work. Tiles are cut along what is summed into units of 64, a stage each, and every CTA takes an equal run of units
// (device/scheduler.cuh). CTAs that share a tile add up by the split-K fix-up (device/split_k.cuh), always in the same
// order, so the same input gives the same bits.
//
// Needs sm_80, K % 32 == 0, block_size % 32 == 0, packed, x, aligned and y aligned to 16 bytes, N * K / 32 below 2^32,
// units times CTAs below 2^32; any M and N. Rows of x whose length is no multiple of 8 are copied ahead to rows that
// are aligned (`align`).
//
// Config:
//   back                   which way
//   w_warps, m_warps       warps side by side along what is produced, and along rows of x
//   columns                groups of 8 rows of x that a warp multiplies
//   stages, resident_ctas  on their way; that share a multiprocessor
//   arithmetic, low_first  how W is decoded; whether the first weight of a byte is in its low half
//   flushes                subnormal weights are zeros
//   x, scale, mma_k        types; 16
//   direct                 the most parts of a tile that its first CTA adds up one by one
//   grouped                the product is of sorted pairs with a stack of experts, and of these
//   activation               of gate and up rows, of which only what it gives is stored
//   wide, scatters           results are fp32; they go to their pairs' rows
//   shared_bytes           dynamic shared memory

#include "decode.cuh"
#include "device/align_rows.cuh"
#include "device/ldmatrix.cuh"

// A lane's numbers of one row of y: eight neighbours, or the four that its gates and ups make.
constexpr u32 COUNT = GATES ? 4 : 8;
// exist: how many of them there are. Whole: all, and rows begin where one instruction can store them.
template <bool Whole>
__device__ __forceinline__ void store_row(const Arguments& a, u64 place, const float (&v)[8], bool wanted, u32 exist) {
  if constexpr (Config::wide) {
    float* to = reinterpret_cast<float*>(a.y) + place;
#pragma unroll
    for (u32 p = 0; p < COUNT; p += Whole ? 4 : 1)
      if constexpr (Whole)
        store_if(wanted, reinterpret_cast<float4*>(to + p), make_float4(v[p], v[p + 1], v[p + 2], v[p + 3]));
      else store_if(wanted && p < exist, to + p, v[p]);
  } else if constexpr (Whole && GATES) {
    store_if(wanted, reinterpret_cast<uint2*>(a.y + place), make_uint2(pack(v[0], v[1]), pack(v[2], v[3])));
  } else if constexpr (Whole) {
    store_if(wanted, reinterpret_cast<uint4*>(a.y + place),
             make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])));
  } else {
#pragma unroll
    for (u32 p = 0; p < COUNT; p++) store_if(wanted && p < exist, a.y + place + p, narrow(v[p]));
  }
}
template <bool Whole>
__device__ __forceinline__ void store_rows(const Arguments& a, const float (&total)[SUMS], const Walk& at, u32 first,
                                           u32 length, const u32 (&bias)[4], u32 row) {
  const u32 rows = rows_from(a, at, 0);
  // The numbers of the rows of y, a few of which are asked for at once. Shared memory has room for those of all rows of
  // a tile, also where there are none.
  constexpr u32 AT_ONCE = Config::columns < 4 ? Config::columns : 4;
  u32 numbers[AT_ONCE][2];
#pragma unroll
  for (u32 c = 0; c < Config::columns; c++) {
    if (c % AT_ONCE == 0)
#pragma unroll
      for (u32 i = 0; i < 2 * AT_ONCE; i++) {
        const u32 m = row + 8 * (c + i / 2) + i % 2;
        if constexpr (Config::scatters) numbers[i / 2][i % 2] = c + i / 2 < Config::columns ? pairs_of_rows(at)[m] : 0;
        else numbers[i / 2][i % 2] = first_row_of(at) + m;
      }
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const bool wanted = row + 8 * c + j < rows;
      if (GATES && Config::columns >= 8 && !wanted) continue;  // there are no registers to gate several rows at once
      float v[8];
#pragma unroll
      for (u32 t = 0; t < 4; t++) {
        const u32 i = 4 * (t * Config::columns + c) + j;
        v[2 * t] = total[i] + unpack(u16(bias[t])), v[2 * t + 1] = total[i + 2] + unpack(u16(bias[t] >> 16));
      }
      if constexpr (GATES)
#pragma unroll
        for (u32 p = 0; p < 4; p++)
          v[p] = gated<Config::activation>(HALVES ? v[p] : v[2 * p], HALVES ? v[4 + p] : v[2 * p + 1]);
      const u64 place = u64(numbers[c % AT_ONCE][j]) * length + first;
      store_row<Whole>(a, place, v, wanted, length - first);
    }
  }
}
// Stores a tile. produced: this lane's first number of each row. row: of the tile, the lane's first.
__device__ __forceinline__ void store(const Arguments& a, const float (&total)[SUMS], const Walk& at, u32 produced,
                                      u32 row) {
  const u32 length = Config::back ? a.k : GATES ? a.n / 2 : a.n, first = GATES ? produced / 2 : produced;
  if (first >= length) return;
  u32 bias[4] = {};  // of two neighbours each
  if (a.bias) {
    const u16* from = a.bias;
    if constexpr (Config::grouped) from += u64(pairs_of(at).expert) * a.n;
#pragma unroll
    for (u32 p = 0; p < 8; p++) {
      const u32 n = HALVES ? first + p % 4 + p / 4 * length : produced + p;
      if (HALVES ? first + p % 4 < length : n < a.n) bias[p / 2] |= u32(from[n]) << p % 2 * 16;
    }
  }
  if (length % COUNT == 0) store_rows<true>(a, total, at, first, length, bias, row);
  else store_rows<false>(a, total, at, first, length, bias, row);
}

constexpr u32 PAIRS = Config::columns / 2;  // of groups of eight rows of x

// What a warp multiplies in a step of 16 summed numbers, from shared memory. Weights of the next step are loaded while
// these are multiplied; rows of x as soon as those before them have been.
struct Operands {
  u32 weights[2][4][4], rows[PAIRS][4];
  // at: the address of this lane's row of a stage's first matrices.
  template <u32 STEP> __device__ __forceinline__ void load_weights(u32 at, u32 t) {
    u32(&to)[4] = weights[STEP % 2][t];
    if constexpr (Config::back) load_transposed(to, (at ^ t << 5) + STEP * (16 * W_ROW));
    else load_matrices(to, (at ^ (STEP ^ t) << 5) + t * (2 * W_ROW));
  }
  template <u32 STEP> __device__ __forceinline__ void load_rows(u32 at, u32 pair) {
    load_matrices(rows[pair], (at ^ STEP << 5) + pair * (16 * DEPTH * 2));
  }
  // Of the first step.
  __device__ __forceinline__ void load_first(u32 w, u32 x) {
#pragma unroll
    for (u32 t = 0; t < 4; t++) load_weights<0>(w, t);
#pragma unroll
    for (u32 pair = 0; pair < PAIRS; pair++) load_rows<0>(x, pair);
  }
};

// A step: of a warp's 64 produced numbers by its rows of x. w, x: where the next step's operands are. beside: what is
// done between the first MMAs. behind: stores to shared memory, which no load of the compiler's may pass.
template <u32 STEP, class Beside, class Behind>
__device__ __forceinline__ void multiply_step(float (&total)[SUMS], Operands& operands, u32 w, u32 x, Beside beside,
                                              Behind behind) {
  constexpr u32 NEXT = (STEP + 1) % 4;
#pragma unroll
  for (u32 pair = 0; pair < PAIRS; pair++) {
#pragma unroll
    for (u32 t = pair * 4 / PAIRS; t < (pair + 1) * 4 / PAIRS; t++) operands.load_weights<NEXT>(w, t);
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
      for (u32 t = 0; t < 4; t++) {
        const u32(&a)[4] = operands.weights[STEP % 2][t], (&b)[4] = operands.rows[pair];
        float (&sum)[4] = reinterpret_cast<float (&)[4]>(total[4 * (t * Config::columns + 2 * pair + i)]);
        mma(sum, a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1]);
      }
    operands.load_rows<NEXT>(x, pair);
    if (pair == 0) beside();
  }
  behind();
}

// The slot of a ring behind this one.
__device__ __forceinline__ u32 after(u32 slot) { return slot + 1 == Config::stages ? 0 : slot + 1; }

extern "C" __global__ void __launch_bounds__(THREADS, Config::resident_ctas)
    multiply(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const u32 w_warp = warp % Config::w_warps, m_warp = warp / Config::w_warps;
  const u32 first = first_unit(a, own_number()), last = end_unit(a, own_number());
  const u32 start = u32(__cvta_generic_to_shared(memory));

  if constexpr (Config::grouped) bring_first_turns(a, start);
  // The first stages set out: W of the first unit by itself.
  Copies copies(a, start, first, last);
  copies.send_w(a);
#pragma unroll
  for (int i = 0; i < Config::stages - 1; i++) {
    copies.begin(a);
    copies.send<0>(a), copies.send<1>(a), copies.send<2>(a), copies.send<3>(a);
  }
  Walk at(a, first), coming(a, first);  // coming: the unit whose scales are loaded next
  Scales scales;
  scales.load(a, coming);
  advance(coming, a);

  // While they are under way.
  clear_stale<THREADS>(a);
  float offset = 0;
  if constexpr (NESTED) {
    for (u32 i = threadIdx.x; i < 256; i += THREADS) reinterpret_cast<float*>(memory)[i] = a.code[i];
    offset = *a.offset;
  }
  const float entry = a.codebook[lane % 16];
  __syncthreads();

  // The first tile is decoded before there is anything to multiply.
  Piece pieces[PIECES];
  const u32 place = W + first_place();
  const auto load_pieces = [&](u32 slot, u32 buffer) {
#pragma unroll
    for (u32 i = 0; i < PIECES; i++)
      pieces[i].load(PACKED + slot * PACKED_BYTES, i, scales.decode(i, offset), place + buffer * W_BYTES);
    scales.load(a, coming);
    advance(coming, a);
  };
  wait_for_groups<Config::stages - 1>();
  load_pieces(0, 0);
  store_part<0>(pieces, entry), store_part<1>(pieces, entry), store_part<2>(pieces, entry),
      store_part<3>(pieces, entry);

  // Where ldmatrix finds this lane's row in the first stage, of W and of x. Its matrices are those of p = 0 and 1, of
  // the first and the second eight summed numbers; and of eight rows of x and the next, likewise.
  const u32 row = lane % 8, second = lane / 16, odd = lane / 8 % 2;
  const u32 w_from = kept(
      start + W +
      (Config::back ? w_place(64 * w_warp, 8 * second + row, odd) : w_place(64 * w_warp + 8 * row + odd, 0, second)));
  const u32 x_from = kept(start + X + x_place(8 * Config::columns * m_warp + 8 * second + row, odd));
  float total[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i] = 0;

  // A stage begins with the step before its first: it is there then, and so is its W, dequantized; the buffer of the
  // stage before is free, for W of the stage after it.
  u32 slot = 0, buffer = 0;  // of the stage that is multiplied
  Operands operands;
  const auto begin_stage = [&](u32 its_slot, u32 its_buffer) {
    copies.begin(a);
    load_pieces(after(its_slot), its_buffer ^ 1);
    copies.send<0>(a);
  };
  wait_for_groups<Config::stages - 2>();
  __syncthreads();
  operands.load_first(w_from, x_from);
  begin_stage(0, 0);
  store_part<0>(pieces, entry);
  for (u32 unit = first; unit < last; unit++) {
    const u32 x = x_from + slot * X_BYTES, w = w_from + buffer * W_BYTES;
    const u32 next_slot = after(slot);
    const u32 next_x = x_from + next_slot * X_BYTES, next_w = w_from + (buffer ^ 1) * W_BYTES;
    multiply_step<0>(total, operands, w, x, [&] { copies.send<1>(a); }, [&] { store_part<1>(pieces, entry); });
    multiply_step<1>(total, operands, w, x, [&] { copies.send<2>(a); }, [&] { store_part<2>(pieces, entry); });
    multiply_step<2>(total, operands, w, x, [&] { copies.send<3>(a); }, [&] { store_part<3>(pieces, entry); });
    wait_for_groups<Config::stages - 2>();
    __syncthreads();
    multiply_step<3>(
        total, operands, next_w, next_x, [&] { begin_stage(next_slot, buffer ^ 1); },
        [&] { store_part<0>(pieces, entry); });
    slot = next_slot, buffer ^= 1;
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      bool stores = true;
      if constexpr (!Config::grouped) stores = fix_up<Config::direct, WARPS>(total, a, at, own_number(), warp, lane);
      if (stores)
        store(a, total, at, row_tile_of(at) * TILE_W + 64 * w_warp + lane / 4 * 8,
              8 * Config::columns * m_warp + lane % 4 * 2);
      bring_next_turns(a, start, at);
#pragma unroll
      for (int i = 0; i < SUMS; i++) total[i] = 0;
      operands.load_first(next_w, next_x);  // again: meanwhile registers were for the sums of others
#pragma unroll
      for (u32 i = 0; i < PIECES; i++) pieces[i].load_words(PACKED + after(next_slot) * PACKED_BYTES, i);
    }
    advance(at, a);
  }
}

// Copies x to rows of `pitch` numbers, with zeros behind the last.
extern "C" __global__ void __launch_bounds__(THREADS) align(const __grid_constant__ Arguments a) {
  align_rows<THREADS>(a, a.x, Config::back ? a.n : a.k);
}
