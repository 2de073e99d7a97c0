// A block of 16 tokens: what a lane holds of it.

#include "work.cuh"

// Which tokens a lane has, and which 16 bytes of their rows.
struct Keys {
  static constexpr u32 TOKENS = 2, PARTS = KEY_PARTS;
  uint4 of[TOKENS][PARTS];
  __device__ static u32 token(u32 half, u32 group, u32) { return group + 8 * half; }
  __device__ static u32 piece(u32 j, u32, u32 member) { return 4 * j + member; }
  __device__ static u16* rows(const Text& text) { return text.keys; }
};
struct Values {
  static constexpr u32 TOKENS = 4, PARTS = VALUE_PARTS;
  uint4 of[TOKENS][PARTS];
  __device__ static u32 token(u32 i, u32, u32 member) { return 2 * member + i % 2 + i / 2 * 8; }
  __device__ static u32 piece(u32 j, u32 group, u32) { return 8 * j + group; }
  __device__ static u16* rows(const Text& text) { return text.values; }
  // Number `place` of this lane's, of tokens 2 i and 2 i + 1.
  __device__ __forceinline__ u32 pair(u32 i, u32 place) const {
    const u32 low = word_of(of[2 * i][place / 8], place % 8 / 2),
              high = word_of(of[2 * i + 1][place / 8], place % 8 / 2);
    return __byte_perm(low, high, place % 2 ? 0x7632 : 0x5410);
  }
};
template <class Half>
__device__ __forceinline__ void load(Half& half, const Text& text, u32 base, u32 page, u32 group, u32 member) {
#pragma unroll
  for (u32 i = 0; i < Half::TOKENS; i++) {
    const u32 token = base + Half::token(i, group, member);
    const auto at = text.place(token, page);
#pragma unroll
    for (u32 j = 0; j < Half::PARTS; j++)
      half.of[i][j] = text.is_in_cache(token) ? load_settled(Half::rows(text) + at + 8 * Half::piece(j, group, member))
                                              : make_uint4(0, 0, 0, 0);
  }
}
// Asks L2 for the keys and values of the block whose turn it is. By a warp.
__device__ __forceinline__ void fetch_block(const Arguments& a, const Text& text, u32 turn, u32 lane) {
  const u32 base = text.token_at(turn);
  if (PAGE == 0 && lane < 2 && turn < text.blocks && base < a.tokens)
    prefetch_bytes((lane == 0 ? text.keys : text.values) + base * SIZE, min(BLOCK, a.tokens - base) * SIZE * 2);
}
// What is added to scores, in their unit: 0, a mask's number, or NONE for what is not seen.
struct Shifts {
  static constexpr u32 COUNT = NEW == 1 || Config::mask == 0 ? 1 : 2 * COLUMNS;  // rows of the mask that a lane needs
  float of[2][COUNT];
  __device__ __forceinline__ void load(const Arguments& a, const Text& text, u32 base, u32 group, u32 first_row) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u32 token = base + group + 8 * half;
      // A new token is seen where the mask says so, whatever the span.
      const bool there = text.is_own(token) | text.is_known(token);
#pragma unroll
      for (u32 i = 0; i < COUNT; i++) {
        of[half][i] = there ? 0.f : NONE;
        if (Config::mask == 0 || !there) continue;
        const u32 row = first_row + i / 2 * 8 + i % 2;
        const long long at = token + (NEW == 1 ? 0 : row % NEW * a.mask_new);
        if constexpr (Config::mask == 1) {
          if (!settled(text.mask + at)) of[half][i] = NONE;
        } else {
          const float number = unpack(settled(reinterpret_cast<const u16*>(text.mask) + at));
          of[half][i] = number > a.lowest ? number * LOG2E : NONE;
        }
      }
    }
  }
  __device__ __forceinline__ float at(u32 half, u32 column, u32 i) const {
    return of[half][COUNT == 1 ? 0 : 2 * column + i];
  }
};
