// The tensor cores of any GPU from sm_75 on: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]), W in 4 bits.
//
// Bytes moved: W's nibbles and scales once for each 8 * m_tiles rows of x, (1/2 + 1/block_size) N K when nested; x once
// for each n_warps * 16 rows of W, from L1 and L2; y. Flops: 2 M N K.
//
// Operands. The kernel computes out.T = W @ x.T: W is the A operand of mma.m16n8k16, and a register of A holds two
// neighbouring k of one row, which is one packed byte, so nothing is repacked. K may be permuted as long as x is
// permuted alike. A row is cut into spans of 64 weights; of a span's 32 bytes each lane of a quad takes 8, and 4 MMAs
// use them up two at a time. Byte i of a lane goes with x[span + 16 * member + 2 * i] and the next, so a lane loads 16
// bytes of x twice a span. Where blocks or K are multiples of 32 only, spans are of 32: 4 bytes a lane, 2 MMAs, one
// load of x.
//
// One look-up in a table of 256 words, with a copy for every lane, turns a byte into two 16-bit numbers: no bank
// conflicts, one shift and one LOP3 for the address. The table alone knows the codebook and which nibble comes first.
// The host multiplies the codebook by a factor that makes its rounding to 16 bits harmless; one over that factor
// (`unit`) goes into the scale, which is applied in fp32 to the sums of each span. A span always lies within one block.
//
// Work. A warp owns 16 rows of W and a stretch of K, and keeps `prefetch` spans of W in flight in registers. The
// k_warps that share rows add up in shared memory; CTAs that share rows (`splits` of them) store partial sums, which
// `combine` adds up. Sums are always added in the same order, so the same input gives the same bits. Columns of an MMA
// are independent: rows of x beyond M repeat the last row, and are computed but not stored.
//
// Needs K % span == 0, block_size % span == 0, packed aligned to 8 bytes and x to 16; any M and N.
// Grid: x = tiles of x * splits, y = CTAs that stride over the tiles of W.
//
// Config: m_tiles (groups of eight rows of x), n_warps, k_warps, prefetch, resident_ctas, span, mma_k (16, or 8 on
// sm_75), x, scale, low_first.

#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/scale.cuh"

constexpr int TILE_N = 16 * Config::n_warps;  // of W, a tile
constexpr int THREADS = 32 * Config::n_warps * Config::k_warps;
constexpr int WORDS = Config::span / 32;  // of W, and 16-byte vectors of x, that a lane takes of a span
constexpr int STEPS = Config::span / 16;  // MMAs a span
constexpr int SUM_COLUMN = 20;            // floats: 16 rows, padded against bank conflicts
constexpr int SUM_WARP = 8 * Config::m_tiles * SUM_COLUMN;

struct Arguments {
  const u8* packed;
  const StoredScale* scale;
  const float *code, *absmax, *offset;  // with NESTED
  const u16 *x, *bias;                  // bias may be null
  u16* y;
  float* partial;              // [splits, m, n] where splits > 1
  u32 m, n, k, splits, shift;  // shift: spans that share a scale, as a power of two
  float unit, codebook[16];
};

struct Span {  // of rows `group` and `group + 8`, as loaded
  u32 words[2][WORDS];
  StoredScale scale[2];
  float absmax[2];
};

// W is read once, so it need not stay in L1; but a load brings its line to L2, which has the warp's next spans.
__device__ __forceinline__ void load(u32 (&words)[2], const u8* from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "l"(from));
}
__device__ __forceinline__ void load(u32 (&words)[1], const u8* from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
}
// The two numbers that byte `i` of `word` stands for; rows of the table are 128 bytes apart.
__device__ __forceinline__ u32 look_up(const u32* table, u32 word, int i, u32 lane) {
  const u32 row = (i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80;
  return *reinterpret_cast<const u32*>(reinterpret_cast<const char*>(table) + (row | 4 * lane));
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::resident_ctas)
    product(const __grid_constant__ Arguments a) {
  __shared__ u32 table[256 * 32];
  extern __shared__ float sums[];
  const u32 lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const u32 row_warp = warp / Config::k_warps, split = blockIdx.x % a.splits,
            first = blockIdx.x / a.splits * (8 * Config::m_tiles);
  const u32 spans = a.k / Config::span;
  const u32 part = split * Config::k_warps + warp % Config::k_warps, parts = a.splits * Config::k_warps;
  const u32 begin = part * spans / parts, end = (part + 1) * spans / parts;

  // Spans are numbered through all of W; a 16-row tile that overhangs repeats the last row, which is not stored.
  u32 row[2];
  Span ring[Config::prefetch];
  auto fetch = [&](Span& to, u32 span) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 at = row[half] + span, block = at >> a.shift;
      load(to.words[half], a.packed + u64(at) * (Config::span / 2) + member * (Config::span / 8));
      to.scale[half] = __ldg(a.scale + block);
      if constexpr (NESTED) to.absmax[half] = __ldg(a.absmax + (block >> 8));
    }
  };
  auto start = [&](u32 tile) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      row[half] = min(tile * TILE_N + row_warp * 16 + group + 8 * half, a.n - 1) * spans;
#pragma unroll
    for (int u = 0; u < Config::prefetch; u++)
      if (begin + u < end) fetch(ring[u], begin + u);
  };
  start(blockIdx.y);

  const float entry = a.codebook[lane % 16];
#pragma unroll 4
  for (u32 byte = warp; byte < 256; byte += Config::n_warps * Config::k_warps) {
    const u16 high = narrow(__shfl_sync(~0u, entry, byte >> 4)), low = narrow(__shfl_sync(~0u, entry, byte & 15));
    table[byte * 32 + lane] = Config::low_first ? u32(high) << 16 | low : u32(low) << 16 | high;
  }
  __shared__ float code[NESTED ? 256 : 1];
  float offset = 0;
  if constexpr (NESTED) {
    for (u32 i = threadIdx.x; i < 256; i += THREADS) code[i] = a.code[i];
    offset = *a.offset;
  }
  auto decode = [&](const Span& span, int half) {
    if constexpr (NESTED) return decode_nested(code[u32(span.scale[half])], span.absmax[half], offset) * a.unit;
    else return decode_stored(span.scale[half]) * a.unit;
  };

  const u16* x = a.x + u64(first) * a.k;
  u32 column[Config::m_tiles];
#pragma unroll
  for (int c = 0; c < Config::m_tiles; c++)
    column[c] = min(8 * c + group, a.m - 1 - first) * a.k + member * (Config::span / 4);
  __syncthreads();

  for (u32 tile = blockIdx.y; tile * TILE_N < a.n; tile += gridDim.y) {
    float total[Config::m_tiles][4] = {};
    for (u32 span = begin; span < end; span += Config::prefetch)
#pragma unroll
      for (int u = 0; u < Config::prefetch; u++) {
        if (span + u >= end) break;
        u32 w[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
          for (int i = 0; i < 4; i++)  // rows alternate, k comes second: the order of A's registers
            w[step][i] = look_up(table, ring[u].words[i % 2][step / 2], step % 2 * 2 + i / 2, lane);
        const float upper = decode(ring[u], 0), lower = decode(ring[u], 1);
        if (span + u + Config::prefetch < end) fetch(ring[u], span + u + Config::prefetch);
#pragma unroll
        for (int c = 0; c < Config::m_tiles; c++) {
          const uint4* from = reinterpret_cast<const uint4*>(x + (span + u) * Config::span + column[c]);
          float sum[4] = {};
#pragma unroll
          for (int i = 0; i < WORDS; i++) {
            const uint4 b = __ldg(from + i);
            mma(sum, w[2 * i][0], w[2 * i][1], w[2 * i][2], w[2 * i][3], b.x, b.y);
            mma(sum, w[2 * i + 1][0], w[2 * i + 1][1], w[2 * i + 1][2], w[2 * i + 1][3], b.z, b.w);
          }
          promote(total[c], sum, upper, lower);
        }
      }
    if ((tile + gridDim.y) * TILE_N < a.n) start(tile + gridDim.y);  // in flight while sums are added up

    __syncthreads();  // the sums of the tile before have been read
#pragma unroll
    for (int c = 0; c < Config::m_tiles; c++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[warp * SUM_WARP + (8 * c + 2 * member + i % 2) * SUM_COLUMN + group + i / 2 * 8] = total[c][i];
    __syncthreads();
#pragma unroll 1  // registers are for the spans in flight
    for (u32 i = threadIdx.x; i < 8 * Config::m_tiles * TILE_N; i += THREADS) {
      const u32 r = i % TILE_N, c = i / TILE_N, n = tile * TILE_N + r, m = first + c;
      if (n >= a.n || m >= a.m) continue;
      const float* from = sums + r / 16 * Config::k_warps * SUM_WARP + c * SUM_COLUMN + r % 16;
      float sum = from[0];
#pragma unroll
      for (int k = 1; k < Config::k_warps; k++) sum += from[k * SUM_WARP];
      if (a.splits > 1) a.partial[(u64(split) * a.m + m) * a.n + n] = sum;
      else a.y[u64(m) * a.n + n] = finish(sum, a.bias, n);
    }
  }
}

// y = the sum of the partial sums, + bias: one thread a number.
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ Arguments a) {
  const u64 at = u64(blockIdx.x) * 256 + threadIdx.x, count = u64(a.m) * a.n;
  if (at >= count) return;
  float sum = a.partial[at];
  for (u32 split = 1; split < a.splits; split++) sum += a.partial[split * count + at];
  a.y[at] = finish(sum, a.bias, at % a.n);
}
