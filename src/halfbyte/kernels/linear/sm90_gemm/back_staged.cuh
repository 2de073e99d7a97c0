// The way back with Config::staged: operands go through shared memory, and wgmma transposes them.
//
// back.cuh's lane has many rows of W, each with a scale of its own, so all its look-ups are in shared memory. Here a
// thread has half of a row of a turn, 32 columns with one scale, keeps the scale's products with the codebook in
// registers (device/permuted_table.cuh), and stores weights. What it stores is the row, 128 bytes in 16-byte pieces
// that are swizzled by the row, with its columns in the order of the MMA: those of a warp are 16, of which lanes have
// neighbours, so eight even ones come before eight odd ones.
//
// A warpgroup has STAGED turns of operands. Its warps meet once a turn, between what they store and the products.
// Behind that all have waited for the products before the last, so there is room for the turn after the next one.

#include "back.cuh"
#include "device/permuted_table.cuh"

struct StagedOperands {
  u32 first, at;
  __device__ StagedOperands next() const {
    const u32 after = at + STAGED_BYTES;
    return {first, after == first + STAGED * STAGED_BYTES ? first : after};
  }
};
__device__ __forceinline__ void begin(StagedOperands& it, u32 warp) {
  it.first = it.at = shared() + warp / 4 * STAGED * STAGED_BYTES;
}
// In front of a turn: the warpgroup's warps have stored its operands, and the next has the room behind them.
__device__ __forceinline__ void go_on(const StagedOperands& now, StagedOperands& next, u32 warp) {
  next = now.next();
  meet_group(3 + warp / 4);
}
// Where they are in registers there is nothing to do.
__device__ __forceinline__ void begin(u32 (&)[OPERANDS], u32) {}
__device__ __forceinline__ void go_on(const u32 (&)[OPERANDS], u32 (&)[OPERANDS], u32) {}

template <bool Staged> struct OperandsOf {
  typedef u32 Type[OPERANDS];
};
template <> struct OperandsOf<true> {
  typedef StagedOperands Type;
};

// As decode.cuh's Decoder.
class StagedDecoder {
 public:
  __device__ StagedDecoder(u32 warp, u32 lane)
      : column(warp * 16 + lane / 4 * 2), own(warp % 2 * 32 + lane), piece(warp / 2) {}
  __device__ u32 row() const { return column; }
  __device__ __forceinline__ void load(u32 stage, int turn) {
    words = load_four_words(stage + (turn * TURN_K + own) * ROW_BYTES + (piece ^ own / 2 & 3) * 16);
  }
  __device__ __forceinline__ void decode(const StagedOperands& to, const float (&codebook)[16], u32 scales,
                                         int turn) const {
    const float scale = load_float(scales + (piece * 32 / Config::span * UNIT_K + turn * TURN_K + own) * 4);
    const PermutedTable table([&](int i) { return scaled(codebook[i], scale); });
    const u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {  // sixteen columns, a warp's
      u32 even[2][2], odd[2][2];
#pragma unroll
      for (int j = 0; j < 2; j++) table.look_up_apart(four[2 * i + j], even[j], odd[j]);
      store(to, piece % 2 * 4 + 2 * i, even), store(to, piece % 2 * 4 + 2 * i + 1, odd);
    }
    publish_writes();
  }

 private:
  u32 column;      // the first of the lane's sums
  u32 own, piece;  // its row of a turn, and which 16 bytes of that
  uint4 words;

  __device__ __forceinline__ void store(const StagedOperands& to, u32 place, const u32 (&eight)[2][2]) const {
    store_four_words(to.at + own * 128 + (place ^ own & 7) * 16,
                     make_uint4(eight[0][0], eight[0][1], eight[1][0], eight[1][1]));
  }
};
