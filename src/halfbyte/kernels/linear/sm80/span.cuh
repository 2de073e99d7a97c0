// One span: from nibbles to the MMA's A operand, and the product with all rows of x.

#include "work.cuh"

// Of two 16-bit numbers with the last bits of a nibble each (below), the integers from -8 to 7.
__device__ __forceinline__ u32 minus_offset(u32 pair) {
  u32 integers;
  if constexpr (FP16) {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(integers) : "r"(pair), "r"(0x64086408));
  } else {  // times 1: sm_80 has no sum alone
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(integers) : "r"(pair), "r"(0x3f803f80), "r"(0xc308c308));
  }
  return integers;
}
// Two 16-bit numbers of byte J of `word`. high: word >> 4. column: this lane's of the table, in bytes.
template <int J> __device__ __forceinline__ u32 decode(u32 word, u32 high, u32 column) {
  if constexpr (Config::arithmetic) {
    // The first bits are those of 1024 in fp16 and of 128 in bf16, whose units in the last place are 1.
    constexpr u32 BASE = FP16 ? 0x64006400 : 0x43004300;
    const u32 first = Config::low_first ? word : high, second = Config::low_first ? high : word;
    return minus_offset(__byte_perm(first, second, J | J + 4 << 8) & 0x000f000f | BASE);
  } else {
    const u32 row = (J == 0 ? word << 7 : word >> (8 * J - 7)) & 0x7f80;  // rows of the table are 128 bytes apart
    return *reinterpret_cast<const u32*>(memory + (row | column));
  }
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

// This lane's A operands of a span of the stage, in the order of device/mma.cuh, for each group of 16 rows.
__device__ __forceinline__ void decode(u32 (&weights)[Config::row_groups][STEPS][4], const unsigned char* stage,
                                       u32 span, const Places& places) {
#pragma unroll
  for (u32 t = 0; t < Config::row_groups; t++)
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      union {
        Vector<WORDS>::Type loaded;
        u32 words[WORDS];
      };
      const u32 at = (half ? places.lower : places.upper) ^ span * (SPAN / 2);
      loaded = *reinterpret_cast<const Vector<WORDS>::Type*>(stage + at + t * (16 * W_PIECES * 16));
#pragma unroll
      for (u32 i = 0; i < WORDS; i++) {
        const u32 high = words[i] >> 4;
        weights[t][2 * i][half] = decode<0>(words[i], high, places.column);
        weights[t][2 * i][2 + half] = decode<1>(words[i], high, places.column);
        weights[t][2 * i + 1][half] = decode<2>(words[i], high, places.column);
        weights[t][2 * i + 1][2 + half] = decode<3>(words[i], high, places.column);
      }
    }
}

// Adds a span's products, times the scales of the lane's rows of W, to the sums.
__device__ __forceinline__ void multiply_span(float (&total)[SUMS], const float (&scale)[2 * Config::row_groups],
                                              const unsigned char* stage, u32 span, const Places& places) {
  u32 weights[Config::row_groups][STEPS][4];
  decode(weights, stage, span, places);
#pragma unroll
  for (u32 c = 0; c < Config::columns; c++) {
    uint4 x[WORDS];
#pragma unroll
    for (u32 i = 0; i < WORDS; i++) {
      const u32 at = places.x ^ span * (SPAN * 2) ^ i * 16;
      x[i] = *reinterpret_cast<const uint4*>(stage + at + c * (8 * X_PIECES * 16));
    }
    float sum[Config::row_groups][4] = {};
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
#pragma unroll
      for (u32 t = 0; t < Config::row_groups; t++) {
        const u32(&w)[4] = weights[t][step];
        const uint4 four = x[step / 2];
        mma(sum[t], w[0], w[1], w[2], w[3], step % 2 ? four.z : four.x, step % 2 ? four.w : four.y);
      }
#pragma unroll
    for (u32 t = 0; t < Config::row_groups; t++)
#pragma unroll
      for (u32 i = 0; i < 4; i++) total[4 * (t * Config::columns + c) + i] += sum[t][i] * scale[2 * t + i / 2];
  }
}
