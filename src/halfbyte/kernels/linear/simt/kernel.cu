// CUDA cores, for every x and every W in 4 bits: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]).
//
// Bytes moved: W's nibbles and scales once for each tile_m rows of x; x and y are small beside them. Flops: 2 M N K.
//
// A weight is the fp32 number that dequantize rounds, codebook[nibble] * scale; products are fp32 multiply-adds, and a
// sum is rounded once: rows of the identity give dequantize's bits. A scale belongs to a run of the flattened W, so a
// row may begin in the middle of a block, and of a byte.
//
// A warp makes tile_m x tile_n sums, of tile_m rows of x and tile_n rows of W. A step along K is 512 weights, sixteen
// neighbours a lane. A lane adds eight products in a chain, then chains; then lanes add in pairs. That is the whole
// order, whatever tile_m, tile_n and `aligned` are: a row of x always gives the same bits.
//
// The codebook lies in the lanes of the warp: one shuffle looks a nibble up, and the hardware reads only its four bits.
//
// Config: x, scale, low_first (the first weight of a byte is in its low half), flushes (subnormal numbers count as
// zero), aligned (K is a multiple of 16, packed aligned to 8 bytes), tile_m, tile_n, warps.

#include "device/scale.cuh"

struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};

template <Type> struct NumberOf {
  typedef float Number;
};
template <> struct NumberOf<Type::fp16> {
  typedef Half Number;
};
template <> struct NumberOf<Type::bf16> {
  typedef Bfloat Number;
};
typedef NumberOf<Config::x>::Number Number;

constexpr int EIGHT = 8, PIECE = 2 * EIGHT, STEP = 32 * PIECE, SUMS = Config::tile_m * Config::tile_n;
static_assert(SUMS <= 32 && (SUMS & (SUMS - 1)) == 0, "in the end a sum lies in 32 / SUMS lanes");

struct Arguments {
  const u8* packed;
  const StoredScale* scale;
  const float *code, *absmax, *offset, *codebook;
  const Number *x, *bias;  // bias may be null
  Number* y;
  u64 m, n, k;
  u32 block_log2, nested_log2;  // weights of a block, and blocks that share an entry of absmax
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(Bfloat value) { return from_bf16(value.bits); }
__device__ __forceinline__ float widen(Half value) { return from_fp16(value.bits); }

__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(Half* to, float value) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(value));
}
__device__ __forceinline__ void store(Bfloat* to, float value) {  // by hand: sm_75 has no instruction for it
  const u32 bits = __float_as_uint(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = value == value ? rounded : 0x7fff;
}

// Rounded by itself, and flushed where dequantize flushes.
__device__ __forceinline__ float multiply(float a, float b) {
  if constexpr (!Config::flushes) return __fmul_rn(a, b);
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// Eight numbers from an address that is a multiple of 16.
__device__ __forceinline__ void load(float (&to)[EIGHT], const float* from) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from) + half);
    to[4 * half] = four.x, to[4 * half + 1] = four.y, to[4 * half + 2] = four.z, to[4 * half + 3] = four.w;
  }
}
template <typename Short> __device__ __forceinline__ void load(float (&to)[EIGHT], const Short* from) {
  const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
  const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < EIGHT; i++) to[i] = widen(Short{(u16)(words[i / 2] >> 16 * (i % 2))});
}

struct Scale {  // of a block, as loaded: decoding waits for the load
  StoredScale stored;
  float absmax;
};
__device__ __forceinline__ Scale fetch_scale(const Arguments& a, u64 block) {
  return {a.scale[block], NESTED ? __ldg(a.absmax + (block >> a.nested_log2)) : 0.0f};
}
__device__ __forceinline__ float decode(const Arguments& a, Scale scale, float offset) {
  if constexpr (NESTED) return __fadd_rn(multiply(__ldg(a.code + u32(scale.stored)), scale.absmax), offset);
  else return decode_stored(scale.stored);
}

struct Piece {  // up to PIECE neighbouring weights of a row, as loaded
  u32 bytes[Config::aligned ? 2 : 3];
  Scale first;
  // What follows is for pieces that begin anywhere:
  Scale last;       // of another block, if one ends in between
  u32 count, same;  // how many weights there are, and how many of them, or more, have the first scale
  bool odd;         // the first weight is the second of its byte
};

// The weights of a row from k on, the first of which has number `begin` in W. Beyond K, weight 0 stands for anything:
// loads without a condition are all in flight at once.
__device__ __forceinline__ Piece fetch(const Arguments& a, u64 begin, u64 k) {
  Piece piece;
  begin = k < a.k ? begin : 0;
  const u8* bytes = a.packed + begin / 2;
  piece.first = fetch_scale(a, begin >> a.block_log2);
  if constexpr (Config::aligned) {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(bytes));
    piece.bytes[0] = words.x, piece.bytes[1] = words.y;
    return piece;
  }
  const u32 size = 1u << a.block_log2, count = k < a.k ? min(a.k - k, u64(PIECE)) : 1;
  piece.last = fetch_scale(a, (begin + count - 1) >> a.block_log2);
  piece.count = count, piece.same = size - (u32(begin) & (size - 1)), piece.odd = begin % 2;
  piece.bytes[0] = piece.bytes[1] = piece.bytes[Config::aligned ? 0 : 2] = 0;
#pragma unroll
  for (int i = 0; i <= PIECE / 2; i++)
    if (2 * i < piece.odd + count) piece.bytes[i / 4] |= u32(__ldg(bytes + i)) << 8 * (i % 4);
  return piece;
}

// Eight nibbles of bytes in order, the first weight's lowest.
__device__ __forceinline__ u32 in_order(u32 bytes) {
  return Config::low_first ? bytes : (bytes >> 4 & 0x0f0f0f0f) | (bytes << 4 & 0xf0f0f0f0);
}
__device__ __forceinline__ u32 nibbles(const Piece& piece, int word) {
  if constexpr (Config::aligned) return in_order(piece.bytes[word]);
  else return __funnelshift_r(in_order(piece.bytes[word]), in_order(piece.bytes[word + 1]), 4 * piece.odd);
}

// Eight numbers of a row of x from k on, and zeros beyond its end.
__device__ __forceinline__ void fetch_x(float (&x)[EIGHT], const Arguments& a, u64 row, u64 k) {
  const Number* from = a.x + row * a.k + k;
  if constexpr (Config::aligned) return load(x, from);
#pragma unroll
  for (int i = 0; i < EIGHT; i++) x[i] = k + i < a.k ? widen(from[i]) : 0.0f;
}

// Adds what lanes have of each sum: those 16 apart, then 8, 4, 2, 1. A lane that has several sums left keeps half of
// them and gives the other half away, so that a sum ends in the lane, or lanes, of its own number.
template <int APART> __device__ __forceinline__ void add_up(float (&sum)[SUMS], u32 lane) {
  constexpr int LEFT = SUMS * APART / 32;
  const bool upper = lane & APART;
#pragma unroll
  for (int i = 0; i < LEFT; i++) {
    const float kept = upper ? sum[LEFT + i] : sum[i], given = upper ? sum[i] : sum[LEFT + i];
    sum[i] = kept + __shfl_xor_sync(~0u, given, APART);
  }
  if (LEFT == 0) sum[0] += __shfl_xor_sync(~0u, sum[0], APART);
  if constexpr (APART > 1) add_up<APART / 2>(sum, lane);
}

// Three CTAs a multiprocessor: with more, registers are spilled; with fewer, there is too little to hide loads behind.
extern "C" __global__ void __launch_bounds__(32 * Config::warps, 3) exact(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32;
  const u64 column = (u64(blockIdx.x) * Config::warps + threadIdx.x / 32) * Config::tile_n;
  if (column >= a.n) return;
  const float codebook = a.codebook[lane % 16], offset = NESTED ? *a.offset : 0.0f;

  for (u64 row = u64(blockIdx.y) * Config::tile_m; row < a.m; row += u64(gridDim.y) * Config::tile_m) {
    u64 k = lane * PIECE, begin[Config::tile_n];
    Piece piece[Config::tile_n];
#pragma unroll
    for (int c = 0; c < Config::tile_n; c++) {  // rows beyond N repeat the last one, and so do those of x
      begin[c] = min(column + c, a.n - 1) * a.k + k;
      piece[c] = fetch(a, begin[c], k);
    }
    float sum[SUMS] = {};
    for (u64 step = 0; step < a.k; step += STEP, k += STEP) {
      Piece now[Config::tile_n];
      float first[Config::tile_n], last[Config::tile_n];
#pragma unroll
      for (int c = 0; c < Config::tile_n; c++) {
        now[c] = piece[c];
        piece[c] = fetch(a, begin[c] += STEP, k + STEP);  // in flight while this one is multiplied
        first[c] = decode(a, now[c].first, offset),
        last[c] = Config::aligned ? first[c] : decode(a, now[c].last, offset);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float w[Config::tile_n][EIGHT];
#pragma unroll
        for (int c = 0; c < Config::tile_n; c++)
#pragma unroll
          for (int i = 0; i < EIGHT; i++) {
            const u32 number = EIGHT * half + i;
            const float value = __shfl_sync(~0u, codebook, nibbles(now[c], half) >> 4 * i, 16);
            w[c][i] = multiply(value, Config::aligned || number < now[c].same ? first[c] : last[c]);
            if (!Config::aligned && number >= now[c].count) w[c][i] = 0.0f;
          }
        if (k < a.k)
#pragma unroll
          for (int r = 0; r < Config::tile_m; r++) {
            float x[EIGHT];
            fetch_x(x, a, min(row + r, a.m - 1), k + EIGHT * half);
#pragma unroll
            for (int c = 0; c < Config::tile_n; c++) {
              float chain = __fmul_rn(x[0], w[c][0]);
#pragma unroll
              for (int i = 1; i < EIGHT; i++) chain = __fmaf_rn(x[i], w[c][i], chain);
              sum[r * Config::tile_n + c] += chain;
            }
          }
      }
    }
    add_up<16>(sum, lane);
    const u32 mine = lane / (32 / SUMS);
    const u64 to_row = row + mine / Config::tile_n, to_column = column + mine % Config::tile_n;
    if (lane % (32 / SUMS) == 0 && to_row < a.m && to_column < a.n) {
      if (a.bias) sum[0] += widen(a.bias[to_column]);
      store(a.y + to_row * a.n + to_column, sum[0]);
    }
  }
}
