// From packed weights to the tile that ldmatrix reads: each thread decodes 32 neighbours of a row at a time, which lie
// in one block, so they have one scale.

#include "device/integers.cuh"
#include "device/scaled.cuh"
#include "fetch.cuh"

// Where weights are integers and scales are of the type of x (Config::arithmetic), two weights are computed side by
// side and multiplied by the scale in that type. Others are looked up in the registers of other lanes, each of which
// has one of the sixteen numbers: that needs no table, and no instruction to mask a nibble. They are multiplied in
// fp32. Either way an operand is the dequantized weight, rounded once.

// Two that are looked up: of nibbles FIRST of one word and SECOND of another.
template <u32 FIRST, u32 SECOND>
__device__ __forceinline__ u32 two_weights(u32 first, u32 second, float scale, float entry) {
  const float upper = __shfl_sync(~0u, entry, first >> 4 * FIRST, 16);
  const float lower = __shfl_sync(~0u, entry, second >> 4 * SECOND, 16);
  return pack(scaled(upper, scale), scaled(lower, scale));
}
// Where a word has the weight number `i`, counted in nibbles.
__device__ constexpr u32 nibble_of(u32 i) { return Config::low_first ? i : i ^ 1; }

// Where a thread's first piece goes in a tile of weights, and how far on its next ones.
__device__ __forceinline__ u32 first_place() {
  const u32 row = piece_row(0), column = piece_column();
  return Config::back ? w_place(column, row, 0) + column / 32 % 2 * 8 : w_place(row, 0, column / 8);
}
constexpr u32 ROW_STEP = THREADS / (Config::back ? TILE_W / 32 : DEPTH / 32), PIECE_STEP = ROW_STEP * W_ROW;
static_assert(PIECES == 1 || ROW_STEP % (Config::back ? 8 : 64) == 0, "pieces of a thread are turned alike");

// A piece of the packed tile on its way to the other one. Parts 0 to 3 of it are done at four times, between MMAs.
struct Piece {
  u32 words[4], to;  // where part 0 goes in shared memory
  float scale;       // or, with `arithmetic`, a pair of it in the type of x

  // Piece i of this thread. from: where the packed tile is in shared memory. tile: where weights are made, the place of
  // this thread's first one.
  __device__ __forceinline__ void load(u32 from, u32 i, float its_scale, u32 tile) {
    load_words(from, i);
    scale = Config::arithmetic ? __uint_as_float(pack(its_scale, its_scale)) : its_scale;
    to = tile + i * PIECE_STEP;
  }
  __device__ __forceinline__ void load_words(u32 from, u32 i) {
    const uint4 four = *reinterpret_cast<const uint4*>(memory + (from + (i * THREADS + threadIdx.x) * 16));
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }
  __device__ __forceinline__ u32 folded() const { return __float_as_uint(scale); }
  // Forward, eight neighbours of the row: 16 bytes of it.
  template <u32 PART> __device__ __forceinline__ void store_row(float entry) const {
    const u32 word = words[PART];
    u32 pairs[4];
    if constexpr (Config::arithmetic) {
      integers_in_order(word, pairs);
#pragma unroll
      for (u32 j = 0; j < 4; j++) pairs[j] = fold(pairs[j], folded());
    } else {
      pairs[0] = two_weights<nibble_of(0), nibble_of(1)>(word, word, scale, entry);
      pairs[1] = two_weights<nibble_of(2), nibble_of(3)>(word, word, scale, entry);
      pairs[2] = two_weights<nibble_of(4), nibble_of(5)>(word, word, scale, entry);
      pairs[3] = two_weights<nibble_of(6), nibble_of(7)>(word, word, scale, entry);
    }
    *reinterpret_cast<uint4*>(memory + (to ^ PART * 16)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  // Back, of p = P the four groups that are this piece's: weights P, P + 8, P + 16 and P + 24 of the 32.
  template <u32 P> __device__ __forceinline__ void store_groups(float entry) const {
    constexpr u32 NIBBLE = nibble_of(P);
    u32 pairs[2];
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 first = words[2 * j], second = words[2 * j + 1];
      if constexpr (Config::arithmetic)
        pairs[j] = fold(integers(__byte_perm(first, second, NIBBLE < 4 ? 0x5410 : 0x7632) >> NIBBLE % 4 * 4), folded());
      else pairs[j] = two_weights<NIBBLE, NIBBLE>(first, second, scale, entry);
    }
    *reinterpret_cast<uint2*>(memory + (to ^ P * 16)) = make_uint2(pairs[0], pairs[1]);
  }
  template <u32 PART> __device__ __forceinline__ void store(float entry) const {
    if constexpr (Config::back) store_groups<2 * PART>(entry), store_groups<2 * PART + 1>(entry);
    else store_row<PART>(entry);
  }
};
// Of all pieces of a thread.
template <u32 PART> __device__ __forceinline__ void store_part(const Piece (&pieces)[PIECES], float entry) {
#pragma unroll
  for (u32 i = 0; i < PIECES; i++) pieces[i].store<PART>(entry);
}
