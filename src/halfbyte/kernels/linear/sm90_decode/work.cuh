// What is to be done by kernel.cu, and where: sizes, the layout of shared memory, arguments, tiles and their places.
// Macros and needs are those of kernel.cu.

#include "device/decode.cuh"
#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/pipeline.cuh"
#include "device/scale.cuh"

constexpr int ROWS = 16, BLOCK_BYTES = 32;
constexpr int THREADS = (WARPS + (REGISTERS ? 4 : 1 + REDUCERS)) * 32;  // registers are handed over by four warps each
constexpr u32 PREPARING = (WARPS + REDUCERS) * 32;    // threads of those that have something to do, but the feeder's
static_assert(COLUMNS % REDUCERS == 0 && REDUCERS <= 2, "each adds up as many columns");
constexpr int BLOCKS = WARPS * SLICE;                 // of K, a CTA
constexpr int STEP_SLICE = SLICE / STEPS, STEP_BLOCKS = WARPS * STEP_SLICE;
constexpr int EACH = SLICE / 2 / TOGETHER;            // scales that a lane decodes, each of TOGETHER blocks
constexpr int OWN_BYTES = EACH * TOGETHER / SHARED_BY * SCALE_SIZE;  // that they come from
constexpr bool ONE_ABSMAX = CHUNK == 128;             // K is a multiple of 256: four blocks have the same
constexpr bool FEW_REGISTERS = 0 < REGISTERS && REGISTERS < 128;
constexpr u32 STAGE = ROWS * STEP_BLOCKS * BLOCK_BYTES;
constexpr u32 SCALES_OF_ROW = (BLOCKS + SHARED_BY - 1) / SHARED_BY * SCALE_SIZE;  // of all steps
constexpr u32 SCALE_ROW = WHOLE ? SCALES_OF_ROW : OFFSET ? (SCALES_OF_ROW + 15) / 16 * 16 + 32 : SCALE_CHUNK;
constexpr int SCALE_COPIES = WHOLE || OFFSET ? 1 : (SCALES_OF_ROW + SCALE_CHUNK - 1) / SCALE_CHUNK;
constexpr u32 SCALE_STAGE = SCALE_COPIES * ROWS * SCALE_ROW;
constexpr int SCALE_STAGES = (STAGES + STEPS - 1) / STEPS;  // a tile's scales come with its first step, and stay for it
constexpr int SLOTS = CLUSTER > 4 ? 2 : 4;  // buffers of sums from the cluster; SUMS are those within the CTA
constexpr u32 SUM_COLUMN = 20 * 4;                    // bytes: 16 rows, padded
constexpr u32 SUM_WARP = 8 * COLUMNS * SUM_COLUMN;
constexpr u32 SENT = COLUMNS * 512;                   // bytes of one CTA's sums on their way to the first

// Shared memory: the table, the codes, barriers, sums, sums from the cluster, tiles, scales.
#define ALIGNED(bytes) (((bytes) + 1023) / 1024 * 1024)  // as swizzles ask for
constexpr u32 CODE = 256 * TABLE_ROW;
constexpr u32 FULL = CODE + 1024 * PARTS, EMPTY = FULL + 64, SUM_FULL = EMPTY + 64, SUM_EMPTY = SUM_FULL + 16;
constexpr u32 SLOT_FULL = SUM_EMPTY + 16, SLOT_EMPTY = SLOT_FULL + 32;
constexpr u32 SUM = FULL + 256;
constexpr u32 SLOT = SUM + SUMS * WARPS * SUM_WARP;
constexpr u32 TILES = ALIGNED(SLOT + SLOTS * (CLUSTER - 1) * SENT);
constexpr u32 SCALES = TILES + STAGES * STAGE;
constexpr u32 ABSMAX = SCALES + SCALE_STAGES * SCALE_STAGE;
constexpr u32 SCALED = ABSMAX + NESTED * SCALE_STAGES * 128;
constexpr u32 SCALED_PITCH = 20 * 4, SCALED_WARP = SLICE / TOGETHER * SCALED_PITCH;  // bytes: 16 rows, padded
static_assert(SCALED + WARPS * SCALED_WARP == SHARED_BYTES, "plan.py reckons with other sizes");
static_assert(SLICE <= 8 && EACH * 2 * TOGETHER == SLICE && STEP_SLICE % TOGETHER == 0, "two lanes a row, whole scales");
static_assert(BLOCKS <= 256, "a row's part has two scales of scales at most");
static_assert(SUMS <= 2, "each has a full and an empty barrier in 16 bytes");
static_assert(STAGES <= 8, "each stage has a full and an empty barrier in 64 bytes");

// Tensor copies write chunks of 16 rows, one behind the other, each row's pieces of 16 bytes swizzled by the number of the
// line of 128 bytes that they are in. Where a row begins; what is to be found there is at that, exclusive or its place in the
// row. And the same place in the row after an even one.
template <u32 CHUNK_BYTES> __device__ __forceinline__ u32 row_at(u32 row) {
  return row * CHUNK_BYTES + (row * CHUNK_BYTES / 128 % 8 & CHUNK_BYTES / 16 - 1) * 16;
}
template <u32 CHUNK_BYTES> __device__ __forceinline__ u32 row_after(u32 at) {
  return (at ^ (CHUNK_BYTES == 128 ? 16 : 0)) + CHUNK_BYTES;
}

struct Weight {
  alignas(64) unsigned char map[128], scale_map[128];  // tensor maps of packed, and of scale but with WHOLE and OFFSET
  const unsigned char* scale;  // u8 with NESTED, else of SCALE_SIZE, fp16 or bf16 where these are two
  const float *code, *absmax, *offset;
};
struct Result {
  const unsigned short* bias;  // null for none
  unsigned short* y;
};
struct Arguments {
  Weight weight[PARTS];
  const unsigned short* x;
  Result result[PARTS];
  u32 m, n[PARTS], first_tile[PARTS], tiles, k;
  float unit, codebook[16];
};

// Of x, for this CTA.
__device__ __forceinline__ u32 first_row() { return BATCHES > 1 ? blockIdx.z * (8 * COLUMNS) : 0; }

struct Tile {  // of which weight, and its first row there
  u32 part = 0, row;
  __device__ __forceinline__ Tile(const Arguments& a, u32 tile) {
#pragma unroll
    for (int i = 1; i < PARTS; i++) part += tile >= a.first_tile[i];
    row = (tile - (PARTS > 1 ? a.first_tile[part] : 0)) * ROWS;
  }
};

// Block i of a warp's slice, counted from the CTA's first: all warps go through K side by side.
__device__ __forceinline__ u32 place(u32 warp, u32 i) {
  return i / STEP_SLICE * STEP_BLOCKS + warp * STEP_SLICE + i % STEP_SLICE;
}
