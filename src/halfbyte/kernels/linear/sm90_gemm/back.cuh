// The way back, with Config::back: dx[m, k] = sum over n of dy[m, n] * W[n, k], from the same bytes of W.
//
// kernel.cu's names stay: its n are the columns of W and its k the rows, so Arguments have n = K and k = N; x is dy.
// With `grouped` these are the sides of one expert.
// W transposed is the A operand: a register of A holds two neighbouring rows of W of one column. A byte has two
// neighbouring columns of one row, so the look-ups of two rows, each times the row's own scale, give the registers of
// two columns, which are rows g and g + 8 of the MMA. ldmatrix transposes on the way: a lane gets, of two neighbouring
// rows, two bytes, of which its warp uses one and the next warp the other.
//
// A unit is UNIT_K rows of W by the CTA's TILE_N columns, 64 bytes a row, in 16-byte pieces that are swizzled by the
// row.

#include "device/ldmatrix.cuh"
#include "device/wide_table.cuh"
#include "work.cuh"

constexpr u32 ROW_BYTES = TILE_N / 2;                // of W, in a unit
constexpr int SPANS_OF_ROW = TILE_N / Config::span;  // scales of a row of W, in a unit
static_assert(!Config::back || ROW_BYTES == 64, "the swizzle is that of rows of 64 bytes");

// Where a thread finds its part of a unit: its first column, its row for ldmatrix, its scales, and which byte of each
// of two rows is its own, as a byte permute picks it.
struct ColumnPlace {
  u32 row, bytes, scales, upper, lower;
  __device__ ColumnPlace(u32 warp, u32 lane) {
    row = warp / 2 * 32 + lane / 4 * 4 + warp % 2 * 2;
    bytes = lane * ROW_BYTES + (warp / 2 ^ lane / 2 & 3) * 16;
    scales = (warp / 2 * 32 / Config::span * UNIT_K + lane % 4 * 8) * SCALE_ITEM;
    upper = COMPUTES ? 0x0200 + warp % 2 * 0x0101 : 0x7604 | warp % 2 << 4, lower = upper + 0x20;
  }
};

// As decode.cuh's Decoder.
class BackDecoder {
 public:
  __device__ BackDecoder(u32 warp, u32 lane) : mine(warp, lane), column(wide_column_of(shared(), lane)) {}
  __device__ u32 row() const { return mine.row; }
  __device__ __forceinline__ void load(u32 stage, int turn) {
#pragma unroll
    for (int i = 0; i < TURN_K / 32; i++)
      load_transposed(rows[i], stage + (turn * TURN_K + i * 32) * ROW_BYTES + mine.bytes);
  }
  __device__ __forceinline__ void decode(u32 (&operands)[OPERANDS], const float (&)[16], u32 scales, int turn) {
    constexpr int LOADED = 16 / SCALE_ITEM / 2;  // scales of two rows each, of a load
    uint4 four;
#pragma unroll
    for (int i = 0; i < OPERANDS / 2; i++) {  // eight rows each; two make an MMA
      if (i % LOADED == 0) four = load_four_words(scales + mine.scales + own_scale(turn * TURN_K + i * 8) * SCALE_ITEM);
      const u32 words[4] = {four.x, four.y, four.z, four.w};
      if constexpr (COMPUTES) two_columns(operands + 2 * i, rows[i / 4][i % 4], words[i % 4]);
      else two_columns(operands + 2 * i, rows[i / 4][i % 4], words[i % 2 * 2], words[i % 2 * 2 + 1]);
    }
  }

 private:
  ColumnPlace mine;
  u32 column;  // of the table
  u32 rows[TURN_K / 32][4];

  // Where a lane's scales of eight rows begin, the rows 2 t and 2 t + 1 of the lane's t, among a column block's.
  static __device__ constexpr int own_scale(int row) { return row / 32 * 32 + row % 32 / 8 * 2; }
  // Of two rows and their scales.
  __device__ __forceinline__ void two_columns(u32* operands, u32 rows, u32 scales) const {
    const u32 bytes = __byte_perm(rows, 0, mine.upper);
    operands[0] = fold(numbers_at<Config::low_first ? 0 : 4>(bytes), scales);
    operands[1] = fold(numbers_at<Config::low_first ? 4 : 0>(bytes), scales);
  }
  __device__ __forceinline__ void two_columns(u32* operands, u32 rows, u32 upper_scale, u32 lower_scale) const {
    const float upper = __uint_as_float(upper_scale), lower = __uint_as_float(lower_scale);
    const float2 of_upper = numbers_of(rows, column, mine.upper), of_lower = numbers_of(rows, column, mine.lower);
    operands[0] = pack(scaled(of_upper.x, upper), scaled(of_lower.x, lower));
    operands[1] = pack(scaled(of_upper.y, upper), scaled(of_lower.y, lower));
  }
};

// Where the scale of a row of a unit is among those of its column block: of 32 rows, a lane's eight side by side. A
// thread of mates has one row.
__device__ __forceinline__ u32 scale_place(u32 row) {
  if constexpr (Config::mates > 1) return row;
  return row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
}

// The first row, among those of all experts, of what a unit is of.
__device__ __forceinline__ u32 first_of(const Arguments&, const StreamUnit&) { return 0; }
__device__ __forceinline__ u32 first_of(const Arguments& a, const GroupedUnit& at) { return at.tile.expert * a.k; }

// Scales of one row of W, as stored, those of the CTA's columns. Row `row` is that of the expert whose first one is
// `begin`.
struct ColumnScales {
  u32 bits[SPANS_OF_ROW];
  float absmax[NESTED ? SPANS_OF_ROW : 1];

  __device__ __forceinline__ void load(const Arguments& a, u32 begin, u32 row, u32 column) {
#pragma unroll
    for (int s = 0; s < SPANS_OF_ROW; s++) {
      const bool exists = row < a.k && column + s * Config::span < a.n;
      const u64 block = exists ? (u64(begin + row) * a.n + column + s * Config::span) >> Config::log_block : 0;
      bits[s] = exists ? u32(__ldg(static_cast<const ScaleBits*>(a.scale) + block)) : 0;
      if (NESTED) absmax[s] = exists ? __ldg(a.absmax + (block >> 8)) : 0.0f;
    }
  }
};
