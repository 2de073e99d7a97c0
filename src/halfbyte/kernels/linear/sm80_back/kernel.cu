// The way back with mma.sync and cp.async, for GPUs from sm_80 on: dx[m, k] = sum over n of dy[m, n] * W[n, k], W in 4
// bits, any M and N.
//
// Bytes moved: W's nibbles and scales once for every TILE_M rows of dy; dy once for every TILE_K columns of W, from L2;
// dx. Flops: 2 M N K.
//
// Operands. The kernel computes dx.T = W.T @ dy.T: a register of A holds two neighbouring rows of W of one column.
// Along N each row has a scale of its own, so scales cannot wait for the sums: an operand is the dequantized weight, a
// number of the codebook times its scale in fp32, rounded once, as dequantize does it.
//
// ldmatrix transposes. Of eight rows of W by 16 bytes a lane gets, with group = lane / 4 and member = lane % 4, two
// bytes of row 2 * member and the same two of the next: columns 4 * group to 4 * group + 3. So 16 rows by 32 columns
// are the operands of two MMAs, and nothing is left over:
//
//              bits of the word      columns 4 group + c       MMA 0            MMA 1
//   row 2 m        0 .. 15         c = 0  1  2  3          c = 0: row g       c = 2: row g
//   row 2 m + 1   16 .. 31         c = 0  1  2  3          c = 1: row g + 8   c = 3: row g + 8
//
// A nibble is looked up in the registers of other lanes, which have the sixteen numbers of the codebook: that needs no
// table, and no instruction to mask the nibble. dy comes by ldmatrix as it is.
//
// Work. Tiles of TILE_K columns of W by TILE_M rows of dy are cut along N into units of 64 rows of W, a stage each, and
// every CTA takes an equal run of units (device/scheduler.cuh). Each of four warps multiplies 32 columns with all rows
// of dy. CTAs that share a tile add up by the split-K fix-up (device/split_k.cuh), always in the same order.
//
// Needs sm_80, K % 32 == 0, block_size % 32 == 0, packed, dy and dx aligned to 16 bytes, N * K / 32 below 2^32, units
// times CTAs below 2^32. Rows of dy whose N is no multiple of 8 are copied ahead to rows that are aligned (`align`).
//
// Config: columns (groups of eight rows of dy), stages (on their way), resident_ctas (that share a multiprocessor),
// direct (the most parts of a tile that its first CTA adds up one by one), x, scale, low_first, flushes, shared_bytes.

#include "device/align_rows.cuh"
#include "device/epilogue.cuh"
#include "device/ldmatrix.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/scale.cuh"
#include "device/scaled.cuh"
#include "device/split_k.cuh"

constexpr u32 WARPS = 4, THREADS = 32 * WARPS;
constexpr u32 TILE_K = 32 * WARPS, TILE_M = 8 * Config::columns, UNIT_N = 64;
constexpr u32 SUMS = 8 * Config::columns;  // four of each MMA

// A stage has UNIT_N rows of W, 64 bytes each, and behind them TILE_M rows of dy, 128 bytes each, in pieces of 16.
constexpr u32 W_BYTES = UNIT_N * TILE_K / 2, STAGE_BYTES = W_BYTES + TILE_M * UNIT_N * 2;
constexpr u32 STAGES = NESTED ? 1024 : 0;  // behind the code of nested scales
static_assert(STAGES + Config::stages * STAGE_BYTES == Config::shared_bytes, "plan.py reckons with other sizes");
extern __shared__ __align__(128) unsigned char memory[];

struct Arguments {
  const u8* packed;
  const StoredScale* scale;
  const float *code, *absmax, *offset;  // with NESTED
  const u16* dy;                        // [m, n]
  u16 *aligned, *dx;                    // [m, pitch], dy itself where its rows are aligned; [m, k]
  float4* workspace;                    // all SENTINEL before this launch
  float4* stale;                        // sums of the launch before, which this one overwrites with SENTINEL
  // shift: 32 weights to a block, as a power of two. row_tiles: of columns of W. depth_units: along N.
  u32 stale_count, m, n, k, pitch, shift, row_tiles, column_tiles, depth_units, ctas;
  float codebook[16];
};

// Where a row of the stage has its piece, such that eight neighbouring rows have one piece in different banks.
__device__ __forceinline__ u32 w_place(u32 row, u32 piece) { return row * 64 + (piece ^ row / 2 % 4) * 16; }
__device__ __forceinline__ u32 dy_place(u32 row, u32 piece) { return W_BYTES + row * 128 + (piece ^ row % 8) * 16; }

// The stages of a run of units, one after the other, as this thread copies them: W and dy beyond their ends are zeros.
struct Copies {
  const u32 ring;
  u32 left, slot;
  WorkUnit at;
  __device__ Copies(const Arguments& a, u32 ring, u32 first, u32 last)
      : ring(ring), left(last - first), slot(0), at(a, first) {}

  __device__ __forceinline__ void send(const Arguments& a) {
    if (left > 0) {
      const u32 stage = ring + slot * STAGE_BYTES, n = at.depth * UNIT_N;
      const u32 k = at.row_tile * TILE_K + threadIdx.x % 4 * 32, m = at.column_tile * TILE_M + threadIdx.x / 8;
#pragma unroll
      for (u32 row = threadIdx.x / 4, i = 0; i < 2; row += 32, i++) {
        const bool exists = n + row < a.n && k < a.k;
        const u8* from = a.packed + (exists ? (u64(n + row) * a.k + k) / 2 : 0);
        copy_async(stage + w_place(row, threadIdx.x % 4), from, exists);
      }
      const u32 first = n + threadIdx.x % 8 * 8;
#pragma unroll
      for (u32 row = 0; row < TILE_M; row += 16) {
        const bool exists = m + row < a.m && first < a.n;
        const u16* from = a.aligned + (exists ? u64(m + row) * a.pitch + first : 0);
        copy_async(stage + dy_place(threadIdx.x / 8 + row, threadIdx.x % 8), from, exists);
      }
      left--;
      at.next(a);
    }
    if (++slot == Config::stages) slot = 0;
    close_group();  // empty ones too: groups are counted
  }
};

// The scales of a unit for the 32 columns of a warp, which lie in one block of each row. A lane has those of its own
// row of the first 32 and of the last 32.
struct Scales {
  StoredScale stored[2];
  float absmax[NESTED ? 2 : 1];

  __device__ __forceinline__ void load(const Arguments& a, const WorkUnit& at, u32 warp, u32 lane) {
    const u32 k = at.row_tile * TILE_K + warp * 32;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u32 n = at.depth * UNIT_N + half * 32 + lane;
      stored[half] = 0;  // of a row that does not exist: it meets zeros of dy
      if constexpr (NESTED) absmax[half] = 0;
      if (n >= a.n || k >= a.k) continue;
      const u32 block = (n * (a.k / 32) + k / 32) >> a.shift;
      stored[half] = __ldg(a.scale + block);
      if constexpr (NESTED) absmax[half] = __ldg(a.absmax + (block >> 8));
    }
  }
  __device__ __forceinline__ float decode(u32 half, float offset) const {
    return decode_scale(stored[half], absmax[NESTED ? half : 0], memory, offset);
  }
};

// This lane's A operands of 32 rows of W by the 32 columns of its warp, by MMA and step of 16 rows. words: from
// ldmatrix, of eight rows each. scale: of row `lane`. entry: number lane % 16 of the codebook.
__device__ __forceinline__ void decode(u32 (&weights)[2][2][4], const u32 (&words)[4], float scale, float entry,
                                       u32 lane) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const float upper = __shfl_sync(~0u, scale, 8 * i + lane % 4 * 2);
    const float lower = __shfl_sync(~0u, scale, 8 * i + lane % 4 * 2 + 1);
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
      const u32 bit = c / 2 * 8 + (c % 2 ^ !Config::low_first) * 4;
      const float first = __shfl_sync(~0u, entry, words[i] >> bit, 16);
      const float second = __shfl_sync(~0u, entry, words[i] >> (bit + 16), 16);
      weights[c / 2][i / 2][i % 2 * 2 + c % 2] = pack(scaled(first, upper), scaled(second, lower));
    }
  }
}

// Stores a tile: of each row of dx four neighbouring columns. k: the first of them.
__device__ __forceinline__ void store(const Arguments& a, const float (&total)[SUMS], const WorkUnit& at, u32 k,
                                      u32 member) {
  if (k >= a.k) return;
#pragma unroll
  for (u32 c = 0; c < Config::columns; c++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 m = at.column_tile * TILE_M + 8 * c + 2 * member + j, i = 8 * c + j;
      const uint2 four = make_uint2(pack(total[i], total[i + 2]), pack(total[i + 4], total[i + 6]));
      store_if(m < a.m, reinterpret_cast<uint2*>(a.dx + u64(m) * a.k + k), four);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::resident_ctas)
    multiply(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that all lanes have the same
  const u32 first = first_unit(a, own_number()), last = first_unit(a, own_number() + 1);

  // The first stages set out, and the scales of the first unit.
  Copies copies(a, u32(__cvta_generic_to_shared(memory)) + STAGES, first, last);
#pragma unroll
  for (int i = 0; i < Config::stages - 1; i++) copies.send(a);
  WorkUnit at(a, first);
  Scales scales;
  scales.load(a, at, warp, lane);

  // While they are under way.
  clear_stale<THREADS>(a);
  float offset = 0;
  if constexpr (NESTED) {
    for (u32 i = threadIdx.x; i < 256; i += THREADS) reinterpret_cast<float*>(memory)[i] = a.code[i];
    offset = *a.offset;
  }
  const float entry = a.codebook[lane % 16];
  __syncthreads();

  // Where ldmatrix finds this lane's row in the first stage: of W, and of dy, whose matrices lie side by side.
  const u32 w_from = kept(u32(__cvta_generic_to_shared(memory)) + STAGES + w_place(lane, warp));
  const u32 dy_from = kept(u32(__cvta_generic_to_shared(memory)) + STAGES + dy_place(lane % 8, lane / 8));
  float total[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i] = 0;
  u32 slot = 0;
  for (u32 unit = first; unit < last; unit++) {
    const float scale[2] = {scales.decode(0, offset), scales.decode(1, offset)};
    WorkUnit next = at;
    next.next(a);
    if (unit + 1 < last) scales.load(a, next, warp, lane);
    wait_for_groups<Config::stages - 2>();
    __syncthreads();  // the stage is there, and everybody is done with the one before, which is filled anew
    copies.send(a);
    const u32 stage = slot * STAGE_BYTES;
    if (++slot == Config::stages) slot = 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      u32 words[4], weights[2][2][4];
      load_transposed(words, w_from + stage + half * (32 * 64));
      decode(weights, words, scale[half], entry, lane);
#pragma unroll
      for (u32 c = 0; c < Config::columns; c++) {
        u32 dy[4];  // of eight rows, 32 numbers along N
        load_matrices(dy, (dy_from ^ half * 64) + stage + c * (8 * 128));
#pragma unroll
        for (u32 step = 0; step < 2; step++)
#pragma unroll
          for (u32 i = 0; i < 2; i++) {
            const u32(&w)[4] = weights[i][step];
            float (&sum)[4] = reinterpret_cast<float (&)[4]>(total[4 * (2 * c + i)]);
            mma(sum, w[0], w[1], w[2], w[3], dy[2 * step], dy[2 * step + 1]);
          }
      }
    }
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      if (fix_up<Config::direct, WARPS>(total, a, at, own_number(), warp, lane))
        store(a, total, at, at.row_tile * TILE_K + warp * 32 + lane / 4 * 4, lane % 4);
#pragma unroll
      for (int i = 0; i < SUMS; i++) total[i] = 0;
    }
    at.next(a);
  }
}

// Copies dy to rows of `pitch` numbers, with zeros behind the last.
extern "C" __global__ void __launch_bounds__(THREADS) align(const __grid_constant__ Arguments a) {
  align_rows<THREADS>(a, a.dy, a.n);
}
