// Sizes, what the kernel is told, and where shared memory has what; kernel.cu says what Config holds.
//
// Tiles of W are named by what is produced of them and what is summed: on the way forward rows of W are produced and
// columns summed (W is [produced, summed]), on the way back columns are produced and rows summed.
//
// Dynamic shared memory: the code of nested scales; a ring of stages of x, TILE_M rows of DEPTH numbers; two tiles of
// dequantized weights, one that is multiplied and one that is made; a ring of packed tiles.
//
// The produced numbers of a warp, 64 of them, are numbered so that a lane ends with eight neighbours: of those whose
// number is 8 * group + p, the MMA of row group p / 2 has p % 2 == 0 in its row `group` and the other in its row
// `group + 8`. So a matrix of ldmatrix has the eight numbers of one p.
//
//   forward   a tile of weights has a row of 128 bytes for each produced number, DEPTH summed ones in it
//   back      it has a row for each of the DEPTH summed numbers, of 16 bytes for each warp and p: the eight groups
//
// Pieces of 16 bytes are turned within their 128 by an exclusive or (x_turn, w_turn), such that eight lanes that
// shared memory serves at once meet all 32 banks, of ldmatrix and of what stores the weights.

// Of experts (Config::grouped) a tile of x has pairs of one of them, see device/grouped.cuh; n is that of one expert.
// Shared memory then has, behind all else, the CTA's tiles and the pairs of their rows (turns.cuh).

#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/scale.cuh"
#include "device/split_k.cuh"

constexpr u32 WARPS = Config::w_warps * Config::m_warps, THREADS = 32 * WARPS;
constexpr u32 TILE_W = 64 * Config::w_warps, TILE_M = 8 * Config::columns * Config::m_warps;
constexpr u32 DEPTH = 64;                     // summed numbers of a stage
constexpr u32 PIECES = 2 * TILE_W / THREADS;  // of 32 weights, that a thread copies and decodes of a stage
constexpr u32 SUMS = 16 * Config::columns;    // of four row groups
constexpr u32 X_BYTES = TILE_M * DEPTH * 2, W_BYTES = TILE_W * DEPTH * 2, PACKED_BYTES = TILE_W * DEPTH / 2;
constexpr u32 W_ROW = Config::back ? TILE_W * 2 : DEPTH * 2;  // bytes of a row of dequantized weights
static_assert(Config::columns % 2 == 0 && PIECES >= 1 && PIECES * THREADS * 16 == PACKED_BYTES,
              "plan.py allows others");

constexpr u32 X = NESTED ? 1024 : 0, W = X + Config::stages * X_BYTES, PACKED = W + 2 * W_BYTES;
constexpr u32 TURNS = PACKED + Config::stages * PACKED_BYTES, TILES_KEPT = 8, ROWS_KEPT = 4;  // of experts, tiles
constexpr u32 TURNS_BYTES = Config::grouped ? TILES_KEPT * 20 + ROWS_KEPT * TILE_M * 4 : 0;
static_assert(TURNS + TURNS_BYTES == Config::shared_bytes, "plan.py reckons with other sizes");
extern __shared__ __align__(128) unsigned char memory[];

struct Arguments {
  const u8* packed;  // W [n, k]
  const StoredScale* scale;
  const float *code, *absmax, *offset;  // with NESTED
  const u16* x;                         // [m, k]; with `back` [m, n]
  u16* aligned;                         // [m, pitch], x itself where its rows are aligned
  const u16* bias;                      // of n, null for none; none with `back`
  u16* y;                               // [m, n]; with `back` [m, k]; fp32 with `wide`
  const void* other;                    // of experts: the routes of sorted pairs
  float4* workspace;                    // all SENTINEL before this launch
  float4* stale;                        // sums of the launch before, which this one overwrites with SENTINEL
  // m: of experts, pairs that share a row of x, or 0 where its rows are sorted. shift: 32 weights to a block, as a
  // power of two. row_tiles: of what is produced. depth_units: of what is summed.
  u32 stale_count, m, n, k, pitch, shift, row_tiles, column_tiles, depth_units, ctas;
  float codebook[16];
};

// Of a lane's eight numbers of y, the first four are gates and the others ups (HALVES); of gpt-oss' rows, which are
// neighbours in W, the even and the odd ones. What is stored then is half as long.
constexpr bool GATES = Config::activation != Activation::none;
constexpr bool HALVES = GATES && Config::activation != Activation::swiglu_oai;

// What a piece is turned by: of x, of a row; and of the weights of a produced or, with `back`, of a summed number.
__device__ __forceinline__ u32 x_turn(u32 row) { return row & 7; }
__device__ __forceinline__ u32 w_turn(u32 produced, u32 summed) {
  if constexpr (Config::back) return (summed ^ produced / 64 * (8 / Config::w_warps)) & 7;
  return (produced ^ produced >> 3) & 7;
}
__device__ __forceinline__ u32 x_place(u32 row, u32 piece) { return row * (DEPTH * 2) + (piece ^ x_turn(row)) * 16; }
// Of the forward way, the piece that has number 8 * piece and on; of the way back, that of a warp's p.
__device__ __forceinline__ u32 w_place(u32 produced, u32 summed, u32 piece) {
  const u32 row = Config::back ? summed : produced;
  return row * W_ROW + (Config::back ? produced / 64 * 128 : 0) + (piece ^ w_turn(produced, summed)) * 16;
}

// Which tile a CTA is at, and which part of what is summed. Of experts the tile's number among those of the CTA; what
// it is, shared memory knows (turns.cuh).
struct Turn {
  u32 tile, depth;
  __device__ Turn(const Arguments&, u32) : tile(0), depth(0) {}
};
template <bool Grouped> struct WalkOf {
  typedef StreamUnit Walk;
};
template <> struct WalkOf<true> {
  typedef Turn Walk;
};
typedef WalkOf<Config::grouped>::Walk Walk;

// The unit after this one. No branch, so that MMAs may stand on both sides of it.
template <class At> __device__ __forceinline__ bool ends_tile(At& at, const Arguments& a) {
  at.depth++;
  const bool ends = at.depth == a.depth_units;
  at.depth = ends ? 0 : at.depth;
  return ends;
}
__device__ __forceinline__ void advance(StreamUnit& at, const Arguments& a) {
  const bool tile_ends = ends_tile(at, a);
  at.column_tile += tile_ends;
  const bool row_ends = at.column_tile == a.column_tiles;
  at.column_tile = row_ends ? 0 : at.column_tile;
  at.row_tile += row_ends;
}
__device__ __forceinline__ void advance(Turn& at, const Arguments& a) { at.tile += ends_tile(at, a); }
