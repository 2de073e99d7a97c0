// One span: from nibbles to the MMA's A operand, and the product with all rows of x.

#include "device/integers.cuh"
#include "work.cuh"

// Two nibbles side by side become a register of A. Neighbouring k are in one byte, so with a table they are looked up
// together. Arithmetic is shorter where the two are four nibbles apart (Config::crossed), as a word has them in place;
// x is then put into the same order, which takes an instruction for two of its numbers, so it pays for few columns.
//
//   nibble of a word    0 1 2 3 4 5 6 7
//   register            0 0 1 1 2 2 3 3      and crossed   0 1 2 3 0 1 2 3

// The two numbers of byte J, from the table. column: this lane's, in bytes.
template <int J> __device__ __forceinline__ u32 look_up(u32 word, u32 column) {
  const u32 row = (J == 0 ? word << 7 : word >> (8 * J - 7)) & 0x7f80;  // rows of the table are 128 bytes apart
  return *reinterpret_cast<const u32*>(memory + (row | column));
}
// The eight numbers of a word, in pairs as drawn above.
__device__ __forceinline__ void decode(u32 (&pairs)[4], u32 word, u32 column) {
  if constexpr (Config::crossed) {
    const u32 rest = word >> 8;
    pairs[Config::low_first ? 0 : 1] = integers(word), pairs[Config::low_first ? 1 : 0] = upper_integers(word);
    pairs[Config::low_first ? 2 : 3] = integers(rest), pairs[Config::low_first ? 3 : 2] = upper_integers(rest);
  } else if constexpr (Config::arithmetic) {
    integers_in_order(word, pairs);
  } else {
    pairs[0] = look_up<0>(word, column), pairs[1] = look_up<1>(word, column);
    pairs[2] = look_up<2>(word, column), pairs[3] = look_up<3>(word, column);
  }
}
// Eight numbers of x in the order of a word's.
__device__ __forceinline__ uint4 in_order(uint4 x) {
  if constexpr (Config::crossed)
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
  return x;
}

template <int Words> struct Vector;
template <> struct Vector<1> {
  typedef u32 Type;
};
template <> struct Vector<2> {
  typedef uint2 Type;
};
template <> struct Vector<4> {
  typedef uint4 Type;
};

// What a lane knows of a stage: where its part of the first span is, of two rows of W and of a row of x, and its column
// of the table, in bytes.
struct Places {
  u32 upper, lower, x, column;
  // row: the first of W. Kept, all of them: the loop over stages has other uses for its instructions.
  __device__ Places(u32 row, u32 lane) {
    constexpr u32 QUARTER = SPAN / 8;  // bytes of W
    const u32 member = lane % 4, piece = member * QUARTER / 16, byte = member * QUARTER % 16;
    upper = kept(w_place(row, piece) + byte);
    lower = kept(w_place(row + 1, piece) + byte);
    x = kept(x_place(lane / 4, member * (SPAN / 32)));
    column = kept(4 * lane);
  }
};

// This lane's words of a span, of a row of W: of the upper eight or the lower eight of a group of 16.
union Words {
  Vector<WORDS>::Type loaded;
  u32 each[WORDS];
  __device__ __forceinline__ void load(const unsigned char* stage, u32 span, u32 row_group, u32 half,
                                       const Places& places) {
    const u32 at = (half ? places.lower : places.upper) ^ span * (SPAN / 2);
    loaded = *reinterpret_cast<const Vector<WORDS>::Type*>(stage + at + row_group * (16 * W_PIECES * 16));
  }
};
// This lane's numbers of x that meet its word number i of a span, of a column group.
__device__ __forceinline__ uint4 load_x(const unsigned char* stage, u32 span, u32 column, u32 i, const Places& places) {
  const u32 at = places.x ^ span * (SPAN * 2) ^ i * 16;
  return in_order(*reinterpret_cast<const uint4*>(stage + at + column * (8 * X_PIECES * 16)));
}

// This lane's A operands of a span of the stage, in the order of device/mma.cuh, for each group of 16 rows.
__device__ __forceinline__ void decode(u32 (&weights)[Config::row_groups][STEPS][4], const unsigned char* stage,
                                       u32 span, const Places& places) {
#pragma unroll
  for (u32 t = 0; t < Config::row_groups; t++)
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      Words words;
      words.load(stage, span, t, half, places);
#pragma unroll
      for (u32 i = 0; i < WORDS; i++) {
        u32 pairs[4];
        decode(pairs, words.each[i], places.column);
        weights[t][2 * i][half] = pairs[0], weights[t][2 * i][2 + half] = pairs[1];
        weights[t][2 * i + 1][half] = pairs[2], weights[t][2 * i + 1][2 + half] = pairs[3];
      }
    }
}

// Columns whose sums grow side by side: an MMA waits for the one before it with the same sums.
constexpr u32 AT_ONCE = Config::columns % 2 == 0 && Config::row_groups < 4 ? 2 : 1;

// Adds a span's products, times the scales of the lane's rows of W, to the sums.
__device__ __forceinline__ void multiply_span(float (&total)[SUMS], const float (&scale)[2 * Config::row_groups],
                                              const unsigned char* stage, u32 span, const Places& places) {
  u32 weights[Config::row_groups][STEPS][4];
  decode(weights, stage, span, places);
#pragma unroll
  for (u32 first = 0; first < Config::columns; first += AT_ONCE) {
    uint4 x[AT_ONCE][WORDS];
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; c++)
#pragma unroll
      for (u32 i = 0; i < WORDS; i++) x[c][i] = load_x(stage, span, first + c, i, places);
    float sum[AT_ONCE][Config::row_groups][4] = {};
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
#pragma unroll
      for (u32 c = 0; c < AT_ONCE; c++)
#pragma unroll
        for (u32 t = 0; t < Config::row_groups; t++) {
          const u32(&w)[4] = weights[t][step];
          const uint4 four = x[c][step / 2];
          mma(sum[c][t], w[0], w[1], w[2], w[3], step % 2 ? four.z : four.x, step % 2 ? four.w : four.y);
        }
#pragma unroll
    for (u32 c = 0; c < AT_ONCE; c++)
#pragma unroll
      for (u32 t = 0; t < Config::row_groups; t++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
          total[4 * (t * Config::columns + first + c) + i] += sum[c][t][i] * scale[2 * t + i / 2];
  }
}
// The same with scales folded into the weights, each as a pair of its own (device/scale.cuh). MMAs then add to the sums
// themselves, so a word of each row is decoded at a time and few registers hold weights.
__device__ __forceinline__ void multiply_span(float (&total)[SUMS], const u32 (&scale)[2 * Config::row_groups],
                                              const unsigned char* stage, u32 span, const Places& places) {
  Words words[Config::row_groups][2];
#pragma unroll
  for (u32 t = 0; t < Config::row_groups; t++)
#pragma unroll
    for (u32 half = 0; half < 2; half++) words[t][half].load(stage, span, t, half, places);
#pragma unroll
  for (u32 i = 0; i < WORDS; i++) {
    u32 weights[Config::row_groups][2][4];
#pragma unroll
    for (u32 t = 0; t < Config::row_groups; t++)
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        u32 pairs[4];
        decode(pairs, words[t][half].each[i], places.column);
#pragma unroll
        for (u32 j = 0; j < 4; j++) weights[t][j / 2][j % 2 * 2 + half] = fold(pairs[j], scale[2 * t + half]);
      }
#pragma unroll
    for (u32 first = 0; first < Config::columns; first += AT_ONCE) {
      uint4 x[AT_ONCE];
#pragma unroll
      for (u32 c = 0; c < AT_ONCE; c++) x[c] = load_x(stage, span, first + c, i, places);
#pragma unroll
      for (u32 step = 0; step < 2; step++)
#pragma unroll
        for (u32 c = 0; c < AT_ONCE; c++)
#pragma unroll
          for (u32 t = 0; t < Config::row_groups; t++) {
            const u32(&w)[4] = weights[t][step];
            float (&sum)[4] = reinterpret_cast<float (&)[4]>(total[4 * (t * Config::columns + first + c)]);
            mma(sum, w[0], w[1], w[2], w[3], step ? x[c].z : x[c].x, step ? x[c].w : x[c].y);
          }
    }
  }
}
