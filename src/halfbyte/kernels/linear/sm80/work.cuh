// Sizes, what the kernel is told, and where a stage has its numbers; kernel.cu says what Config holds.
//
// A stage has the W of TILE_N rows and the x of TILE_M rows, both of TILE_K numbers along K, in pieces of 16 bytes:
//
//   W   rows of 32 * W_PIECES numbers. Of every 16 rows the even ones lie first: a lane takes rows 2 * group and
//       2 * group + 1, so the eight groups of a warp then read neighbouring rows
//   x   rows of 8 * X_PIECES numbers
//
// Which piece lies where in its row depends on the row (w_place, x_place), such that the lanes that shared memory
// serves at once, 8 of them with 16 bytes, 16 with 8 or 32 with 4, use all 32 banks. The piece is put through an
// exclusive or with a number that does not depend on the span, or on which of its pieces it is; so a place is that of a
// span's first piece, exclusive or what these add to it.

#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/scale.cuh"
#include "device/split_k.cuh"

constexpr u32 WARPS = Config::n_warps * Config::k_warps, THREADS = 32 * WARPS;
constexpr u32 TILE_N = 16 * Config::row_groups * Config::n_warps, TILE_M = 8 * Config::columns;
constexpr u32 TILE_K = Config::tile_k, SPAN = Config::span;
constexpr u32 OWN_SPANS = TILE_K / SPAN / Config::k_warps;  // of a stage, that a warp takes
constexpr u32 UNIT_SPANS = 4;  // that a warp takes of a unit: a scale for each lane of a quad
constexpr u32 UNIT_STAGES = UNIT_SPANS / OWN_SPANS;
constexpr u32 WORDS = SPAN / 32, STEPS = SPAN / 16;  // of W, that a lane takes of a row's span; MMAs of a span
constexpr u32 SUMS = 4 * Config::row_groups * Config::columns;
static_assert(OWN_SPANS * UNIT_STAGES == UNIT_SPANS && OWN_SPANS * SPAN * Config::k_warps == TILE_K,
              "plan.py allows others");

constexpr u32 W_PIECES = TILE_K / 32, X_PIECES = TILE_K / 8;  // of a row in a stage
constexpr u32 W_BYTES = TILE_N * W_PIECES * 16, X_BYTES = TILE_M * X_PIECES * 16;

// Dynamic shared memory: the table, the code of nested scales, the stages, sums of warps that share rows.
constexpr u32 TABLE_BYTES = Config::arithmetic ? 0 : 256 * 128, CODE_BYTES = NESTED ? 1024 : 0;
constexpr u32 STAGES = TABLE_BYTES + CODE_BYTES, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr u32 MEETING = STAGES + Config::stages * STAGE_BYTES, MEETING_BYTES = 2048;  // for each warp along N
static_assert(MEETING + (Config::k_warps > 1 ? Config::n_warps * MEETING_BYTES : 0) == Config::shared_bytes,
              "plan.py reckons with other sizes");
extern __shared__ __align__(128) unsigned char memory[];

struct Arguments {
  const u8* packed;
  const StoredScale* scale;
  const float *code, *absmax, *offset;  // with NESTED
  const u16 *x, *bias;                  // bias: null for none
  u16* y;
  float4* workspace;  // all SENTINEL before this launch
  float4* stale;      // sums of the launch before, which this one overwrites with SENTINEL
  // shift: spans that share a scale, as a power of two. depth_units: units along K. ctas: that share the units.
  u32 stale_count, m, n, k, shift, row_tiles, column_tiles, depth_units, ctas;
  float unit, codebook[16];
};

// Where row `row` of the stage's W has its piece `piece`; counted from the stage.
__device__ __forceinline__ u32 w_place(u32 row, u32 piece) {
  const u32 place = row % 2 * 8 + row % 16 / 2;
  const u32 turn = W_PIECES == 8   ? (SPAN == 128  ? (place & 1) * 4
                                      : SPAN == 64 ? (place & 3) * 2
                                                   : place & 7)
                   : W_PIECES == 4 ? (place >> 1 & 1) * 2 + (place >> 2 & 1)
                                   : place >> 2 & 1;
  return ((row / 16 * 16 + place) * W_PIECES + (piece ^ turn)) * 16;
}
// The same of x, which lies behind W.
__device__ __forceinline__ u32 x_place(u32 row, u32 piece) {
  const u32 odd = row % 2;
  const u32 turn = SPAN == 32 ? odd * 4 : SPAN == 64 ? odd : (piece >> 3 & 1) ^ odd * 2;
  return W_BYTES + (row * X_PIECES + (piece ^ turn)) * 16;
}
