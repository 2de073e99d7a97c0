// From a lane's words of W and their scales to the MMA's A operands.

#include "back.cuh"
#include "device/permuted_table.cuh"
#include "device/row_place.cuh"

constexpr int STEPS = Config::span / 16, WORDS = Config::span / 32;  // MMAs a span; words of it that a lane takes
// In a turn: spans, or one that others have a part of; and words of it that a lane takes.
constexpr int TURN_SPANS = TURN_K > Config::span ? TURN_K / Config::span : 1;
constexpr int TURN_WORDS = TURN_K < Config::span ? TURN_K / 32 : WORDS;

// What the nibbles of a span stand for, in the upper of a lane's two rows or in the lower.
template <bool Lower> class SpanOfRow {
 public:
  __device__ __forceinline__ void set(const float (&codebook)[16], u32 its_scale) {
    scale = its_scale;
    if constexpr (PERMUTED)  // rounded as dequantize rounds
      table = PermutedTable([&](int i) { return scaled(codebook[i], __uint_as_float(its_scale)); });
  }
  // The eight weights of a word, two by two.
  __device__ __forceinline__ void weights(u32 word, u32 column, u32 (&pairs)[4]) const {
    if constexpr (COMPUTES) {
      compute_pairs(word, pairs);
#pragma unroll
      for (int j = 0; j < 4; j++) pairs[j] = fold(pairs[j], scale);
    } else if constexpr (PERMUTED) {
      table.look_up(word, pairs);
    } else {
      const float number = __uint_as_float(scale);
      pairs[0] = weights_of<0>(word, column, number), pairs[1] = weights_of<1>(word, column, number);
      pairs[2] = weights_of<2>(word, column, number), pairs[3] = weights_of<3>(word, column, number);
    }
  }

 private:
  static constexpr bool PERMUTED = Config::permutes && Lower;

  u32 scale;  // fp32; or, where weights are computed, a pair of it in the type of x
  PermutedTable table;
};

class Decoder {
 public:
  __device__ Decoder(u32 warp, u32 lane) : mine(warp, lane), column(wide_column_of(shared(), lane)) {}
  __device__ u32 row() const { return mine.row; }
  // This thread's words of a turn of a unit, and then its operands of them. stage, scales: addresses of the unit's.
  // Turns come in their order.
  __device__ __forceinline__ void load(u32 stage, int turn) {
#pragma unroll
    for (int s = 0; s < TURN_SPANS; s++) {
      const int span = turn * TURN_K / Config::span + s, word = turn * TURN_K % Config::span / 32;  // the turn's first
      // With LANE_SPANS a step has as much of a lane's own span as others have of theirs.
      const u32 place = span * (LANE_SPANS ? 8 : Config::span / 2);
      if constexpr (IN_ORDER) {
        load_in_order(words[s][0], stage + mine.upper, place + word * 16, mine.own);
        load_in_order(words[s][1], stage + mine.lower, place + word * 16, mine.own);
      } else {
        ::load(words[s][0], stage + (mine.upper ^ place) + word * 4);
        ::load(words[s][1], stage + (mine.lower ^ place) + word * 4);
      }
    }
  }
  __device__ __forceinline__ void decode(u32 (&operands)[OPERANDS], const float (&codebook)[16], u32 scales, int turn) {
#pragma unroll
    for (int s = 0; s < TURN_SPANS; s++) {
      const int span = turn * TURN_K / Config::span + s, word = turn * TURN_K % Config::span / 32;
      if (word == 0 && (!LANE_SPANS || span == 0)) {
        const uint2 both = load_pair(scales + mine.scales + (LANE_SPANS ? 0 : span / JOINED * TILE_N * 4));
        upper.set(codebook, both.x), lower.set(codebook, both.y);
      }
#pragma unroll
      for (int i = 0; i < TURN_WORDS; i++) {
        u32 pairs[2][4];
        upper.weights(words[s][0][i], column, pairs[0]), lower.weights(words[s][1][i], column, pairs[1]);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            operands[4 * (s * STEPS + 2 * i + j / 2) + half + j % 2 * 2] = pairs[half][j];
      }
    }
  }

 private:
  RowPlace mine;
  u32 column;  // of the table
  u32 words[TURN_SPANS][2][TURN_WORDS];
  SpanOfRow<false> upper;
  SpanOfRow<true> lower;
};

template <bool Back> struct DecoderOf {
  typedef Decoder Type;
};
template <> struct DecoderOf<true> {
  typedef BackDecoder Type;
};
