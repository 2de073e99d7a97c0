// A block of 16 tokens: what a lane holds of it.

#include "work.cuh"

struct Keys {
  static constexpr u32 PARTS = KEY_PARTS;
  uint4 of[2][PARTS];
  // Calls `each` for each 16 bytes: which they are, where, and whether they are to be read.
  template <class Each>
  __device__ static __forceinline__ void for_each(const Text& text, u32 base, u32 page, u32 group, u32 member,
                                                  const Each& each) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      const u32 token = base + group + 8 * half;
      const bool there = text.is_known(token) & !text.is_own(token);
      const auto at = text.place(token, page);
#pragma unroll
      for (u32 j = 0; j < PARTS; j++) each(half, j, text.keys + at + 32 * j + 8 * member, there);
    }
  }
  __device__ __forceinline__ void load(const Text& text, u32 base, u32 page, u32 group, u32 member) {
    for_each(text, base, page, group, member, [&](u32 half, u32 j, const u16* from, bool there) {
      of[half][j] = there ? load_settled(from) : make_uint4(0, 0, 0, 0);
    });
  }
};
struct Values {
  static constexpr u32 PARTS = VALUE_PARTS;
  uint4 of[4][PARTS];
  __device__ static u32 token(u32 i, u32 member) { return 2 * member + i % 2 + i / 2 * 8; }
  template <class Each>
  __device__ static __forceinline__ void for_each(const Text& text, u32 base, u32 page, u32 group, u32 member,
                                                  const Each& each) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 number = base + token(i, member);
      const bool there = text.is_known(number) & !text.is_own(number);
      const auto at = text.place(number, page);
#pragma unroll
      for (u32 j = 0; j < PARTS; j++) each(i, j, text.values + at + 64 * j + 8 * group, there);
    }
  }
  __device__ __forceinline__ void load(const Text& text, u32 base, u32 page, u32 group, u32 member) {
    for_each(text, base, page, group, member, [&](u32 i, u32 j, const u16* from, bool there) {
      of[i][j] = there ? load_settled(from) : make_uint4(0, 0, 0, 0);
    });
  }
  // Number `place` of this lane's, of tokens 2 i and 2 i + 1.
  __device__ __forceinline__ u32 pair(u32 i, u32 place) const {
    const u32 low = word_of(of[2 * i][place / 8], place % 8 / 2),
              high = word_of(of[2 * i + 1][place / 8], place % 8 / 2);
    return __byte_perm(low, high, place % 2 ? 0x7632 : 0x5410);
  }
};
// Asks L2 for the keys and values of the block whose turn it is. By a warp.
__device__ __forceinline__ void fetch_bytes(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void fetch_block(const Arguments& a, const Text& text, u32 turn, u32 lane) {
  const u32 base = text.token_at(turn);
  if (PAGE == 0 && lane < 2 && turn < text.blocks && base < a.tokens)
    fetch_bytes((lane == 0 ? text.keys : text.values) + base * SIZE, min(BLOCK, a.tokens - base) * SIZE * 2);
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
