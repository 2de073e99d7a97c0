// Sizes, the layout of shared memory, arguments and tiles of kernel.cu, which says what Config holds.

#include "device/decode.cuh"
#include "device/epilogue.cuh"
#include "device/integers.cuh"
#include "device/mma.cuh"
#include "device/partials.cuh"
#include "device/pipeline.cuh"
#include "device/scale.cuh"

constexpr int TILE_N = 16, BLOCK_BYTES = 32;
// setmaxnreg hands registers over by four warps at a time.
constexpr int THREADS = (Config::warps + (Config::registers ? 4 : 1 + Config::reducers)) * 32;
constexpr u32 PREPARING = (Config::warps + Config::reducers) * 32;  // threads that build the table
static_assert(Config::m_tiles % Config::reducers == 0 && Config::reducers <= 2, "each adds up as many columns");

// Blocks of K: of a CTA, of a warp's step and of a step.
constexpr int BLOCKS = Config::warps * Config::slice;
constexpr int STEP_SLICE = Config::slice / Config::steps, STEP_BLOCKS = Config::warps * STEP_SLICE;
constexpr u32 STAGE = TILE_N * STEP_BLOCKS * BLOCK_BYTES;

// A block has one scale, or each half of it has an exponent. What the MMA multiplies in one step is of one half then: a
// lane has eight weights of each half of a row, not sixteen side by side.
constexpr int HALVES = EXPONENTS ? 2 : 1;
constexpr int EACH = Config::slice / 2 / Config::joined;  // blocks, or joined ones, whose scales a lane decodes,
constexpr int OWN_BYTES = EACH * Config::joined / Config::scale_blocks * SCALE_SIZE;  // and the bytes they come from
constexpr bool ONE_ABSMAX = Config::chunk == 128;  // K is a multiple of 256, so four blocks share an absmax
constexpr bool FEW_REGISTERS = 0 < Config::registers && Config::registers < 128;
constexpr u32 SCALES_OF_ROW = (BLOCKS + Config::scale_blocks - 1) / Config::scale_blocks * SCALE_SIZE;  // of all steps
constexpr u32 WINDOW = (SCALES_OF_ROW + 15) / 16 * 16 + 32;
constexpr u32 SCALE_ROW = Config::bulk_scales ? SCALES_OF_ROW : Config::window_scales ? WINDOW : Config::scale_chunk;
constexpr bool TENSOR_SCALES = !Config::bulk_scales && !Config::window_scales;
constexpr int SCALE_COPIES = TENSOR_SCALES ? (SCALES_OF_ROW + Config::scale_chunk - 1) / Config::scale_chunk : 1;
constexpr u32 SCALE_STAGE = SCALE_COPIES * TILE_N * SCALE_ROW;
// A tile's scales come with its first step and stay for all of them.
constexpr int SCALE_STAGES = (Config::stages + Config::steps - 1) / Config::steps;

constexpr u32 SUM_WARP = 8 * Config::m_tiles * TILE_N * 4;  // bytes, see sum_at
constexpr int SLOTS = Config::cluster > 4 ? 2 : 4;          // buffers for sums from other CTAs of the cluster,
constexpr u32 SENT = Config::m_tiles * 512;                 // each with so many bytes from one CTA

// Of x, for its norm: a sum of squares for each row and warp of the cluster. FOLDS_NORM: see norm.cuh.
constexpr bool FOLDS_NORM = Config::norm && !FP16;
constexpr u32 SQUARES_BYTES = Config::cluster * Config::warps * 8 * Config::m_tiles * 4;
constexpr bool GATED = Config::activation != Activation::none;
constexpr bool ROUTED = Config::experts > 0;
static_assert(!GATED || ROUTED || Config::parts == 2, "the first weight gates the second");
static_assert(!ROUTED || (Config::parts == 1 && Config::batches == 1 && Config::m_tiles == 1 && !Config::norm &&
                          !Config::residual),
              "a stack is one weight");
// Gate and up rows of an expert follow one another, so that a tile has both.
constexpr bool INTERLEAVED = Config::activation == Activation::swiglu_oai;
constexpr bool PAIRED = GATED && !INTERLEAVED;  // tiles come by twos

// Shared memory: the table, codes, barriers, sums, sums from the cluster, squares, gate's results, stages, scales,
// absmax, decoded scales.
__device__ constexpr u32 swizzled(u32 bytes) { return (bytes + 1023) / 1024 * 1024; }  // swizzles repeat every 1024
constexpr u32 CODE = 256 * TABLE_ROW, FULL = CODE + 1024 * Config::parts, EMPTY = FULL + 8 * Config::stages;
constexpr u32 SUM_FULL = EMPTY + 8 * Config::stages, SUM_EMPTY = SUM_FULL + 8 * Config::sum_buffers;
constexpr u32 SLOT_FULL = SUM_EMPTY + 8 * Config::sum_buffers, SLOT_EMPTY = SLOT_FULL + 32;
constexpr u32 SQUARES_FULL = SLOT_EMPTY + 32;
constexpr u32 SUM = FULL + (SQUARES_FULL + 8 - FULL + 255) / 256 * 256;
constexpr u32 SLOT = SUM + Config::sum_buffers * Config::warps * SUM_WARP;
constexpr u32 SQUARES = SLOT + SLOTS * (Config::cluster - 1) * SENT;
constexpr u32 GATE = SQUARES + Config::norm * SQUARES_BYTES;
constexpr u32 TILES = swizzled(GATE + PAIRED * SENT);
constexpr u32 SCALES = TILES + Config::stages * STAGE;
constexpr u32 ABSMAX = SCALES + SCALE_STAGES * SCALE_STAGE;
constexpr u32 DECODED = ABSMAX + NESTED * SCALE_STAGES * 128;
constexpr u32 DECODED_PITCH = 20 * 4;  // bytes: 16 rows, padded against bank conflicts
constexpr u32 DECODED_WARP = HALVES * Config::slice / Config::joined * DECODED_PITCH;
// Of experts (routes.cuh): the number of units, the number of an expert's pairs and then its first unit, the expert and
// the pairs of each unit.
constexpr u32 WIDTH = 8 * Config::m_tiles, NOBODY = 0xffff;
constexpr u32 UNITS = (DECODED + Config::warps * DECODED_WARP + 15) / 16 * 16;
constexpr u32 COUNT = UNITS + 16, UNIT_EXPERT = COUNT + 4 * Config::experts;
// A unit is full but for the last of its expert. So there are most where each of these has a single pair, and no more
// experts have any than there are pairs.
constexpr u32 SINGLE = Config::pairs < Config::experts ? Config::pairs : Config::experts;
constexpr u32 MOST_UNITS = (Config::pairs + (WIDTH - 1) * SINGLE) / WIDTH;
constexpr u32 UNIT_PAIRS = (UNIT_EXPERT + 2 * MOST_UNITS + 15) / 16 * 16;
constexpr u32 END = UNIT_PAIRS + 2 * WIDTH * MOST_UNITS;
static_assert(ROUTED || DECODED + Config::warps * DECODED_WARP == Config::shared_bytes,
              "plan.py reckons with other sizes");
static_assert(!ROUTED || END == Config::shared_bytes, "plan.py reckons with other sizes");
static_assert(Config::slice <= 8 && EACH * 2 * Config::joined == Config::slice && STEP_SLICE % Config::joined == 0,
              "two lanes a row, whole scales");
static_assert(BLOCKS <= 256, "a row's part has two scales of scales at most");
static_assert(!Config::bulk_weights || (ROUTED && Config::cluster == 1 && Config::steps == 1),
              "rows of a tile lie one after the other, and there are always sixteen");

// The rows of a tile that the MMA's rows `group` and `group` + 8 are, and where the first is among decoded scales.
constexpr bool NEIGHBOURS = !EXPONENTS && !Config::bulk_weights;
constexpr u32 NEXT_ROW = NEIGHBOURS ? 1 : 8;
__device__ __forceinline__ u32 upper_row(u32 group) { return NEIGHBOURS ? 2 * group : group; }
__device__ __forceinline__ u32 scale_place(u32 row) { return NEIGHBOURS ? row : row % 8 * 2 + row / 8; }
// The first of eight numbers of a block that a lane has in half of its steps.
__device__ __forceinline__ u32 eight_at(u32 member, u32 half) {
  return EXPONENTS ? half * 32 + member * 8 : member * 16 + half * 8;
}

// Where a warp's sums of a column and of four rows of W, number `four`, lie. Two columns fill a line of 128 bytes, in
// which pieces of 16 bytes are permuted: neither those that store a row's columns nor those that load a column's rows
// meet in a bank.
__device__ __forceinline__ u32 sum_at(u32 column, u32 four) {
  return column / 2 * 128 + ((column % 2 * 4 + four) ^ column / 2 % 4 * 2) * 16;
}

// Tensor copies write chunks of 16 rows one after the other, and swizzle 16-byte pieces by the number of their line of
// 128 bytes. row_at: where a row begins; a byte of it is at that address, exclusive or its place in the row. lower_at:
// the same place in a lane's other row.
template <u32 CHUNK_BYTES> __device__ __forceinline__ u32 row_at(u32 row) {
  return row * CHUNK_BYTES + (row * CHUNK_BYTES / 128 % 8 & CHUNK_BYTES / 16 - 1) * 16;
}
template <u32 CHUNK_BYTES> __device__ __forceinline__ u32 lower_at(u32 at) {
  return (at ^ (CHUNK_BYTES == 128 && NEXT_ROW == 1 ? 16 : 0)) + NEXT_ROW * CHUNK_BYTES;
}

struct Weight {
  alignas(64) unsigned char map[128], scale_map[128];  // tensor maps of packed, and of scale with TENSOR_SCALES
  const unsigned char *packed, *scale;                 // scale: as Config::scale says
  const float *code, *absmax, *offset;
};
struct Result {
  const unsigned short* bias;  // null for none
  unsigned short* y;           // fp32 with Config::wide
};
// Of tokens whose experts are added up here: what pairs give, in a workspace (device/partials.cuh); what the launch
// before left there; results; weights of pairs, of 16 bits or 32; what a factor times the sums is added to, or null.
template <bool There> struct Combining {};
template <> struct Combining<true> {
  float4 *sums, *stale;
  unsigned short* out;
  const void* shares;
  const unsigned short* added;
  u32 stale_count, narrow;
  float factor;
};
constexpr u32 TOP_K = Config::combines;  // experts of a token, or 0
struct Arguments : Combining<(TOP_K > 0)> {
  Weight weight[Config::parts];
  const unsigned short *x, *norm, *residual;  // norm: weights of x's norm; residual: [m, n]; null for none
  const void* ids;                            // of experts, a pair of a token and an expert after the other
  Result result[Config::parts];
  u32 m, pairs, n[Config::parts], first_tile[Config::parts], tiles, k;
  // Of a stack: experts, rows of W of one, pairs that share a row of x, whether ids have 64 bits, and whether results
  // of pairs that are nobody's are zeros, which are of 16 bits.
  u32 experts, expert_rows, per_row, wide_ids, clears;
  float unit, epsilon, norm_offset, result_scale, codebook[16];
};

// Where number i of the code of a weight's nested scales lies in shared memory.
__device__ __forceinline__ u32 code_at(u32 part, u32 i) { return CODE + 1024 * part + 4 * i; }

__device__ __forceinline__ u32 row_bytes(const Arguments& a) { return a.k / 2; }  // of W

// The first row of x of this CTA.
__device__ __forceinline__ u32 first_row() { return Config::batches > 1 ? blockIdx.z * (8 * Config::m_tiles) : 0; }

// The number, in the CTA, of block i of a warp's slice: all warps go through K side by side.
__device__ __forceinline__ u32 place(u32 warp, u32 i) {
  return i / STEP_SLICE * STEP_BLOCKS + warp * STEP_SLICE + i % STEP_SLICE;
}
