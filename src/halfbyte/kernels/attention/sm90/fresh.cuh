// New tokens: their queries and keys are normed and turned, and keys and values go into the cache (fresh.py).

#include "block.cuh"

// Angles of a token at a lane's places, which both of a pair need.
struct Angles {
  uint4 cos[KEY_PARTS], sin[KEY_PARTS];
  __device__ __forceinline__ void load(const Arguments& a, u32 which, u32 number, u32 member) {
    const long long from = which * a.cos_text + number * a.cos_new;
#pragma unroll
    for (u32 j = 0; j < KEY_PARTS; j++) {
      const u32 d = 32 * j + 8 * member, angle = Config::halves && d >= ROTARY / 2 ? d - ROTARY / 2 : d;
      const bool turns = d < ROTARY;
      cos[j] = turns ? load_settled(a.cos + from + angle) : make_uint4(0, 0, 0, 0);
      sin[j] = turns ? load_settled(a.sin + from + angle) : make_uint4(0, 0, 0, 0);
    }
  }
};
// A lane's part of a head, eight numbers for each of KEY_PARTS, as it is in memory; and what they turn with.
struct Head {
  // What 32 numbers turn with is another of this lane's 32, or is loaded.
  static constexpr bool LOADS = ROTARY % 64 != 0;
  uint4 of[KEY_PARTS], loaded[LOADS ? KEY_PARTS : 1];
  __device__ __forceinline__ uint4 others(u32 j) const {
    return LOADS ? loaded[LOADS ? j : 0] : of[other(32 * j) / 32];
  }
  __device__ static constexpr u32 other(u32 d) {
    return d >= ROTARY ? d : d < ROTARY / 2 ? d + ROTARY / 2 : d - ROTARY / 2;
  }
  __device__ __forceinline__ void load(const u16* from, bool exists, u32 member) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (u32 j = 0; j < KEY_PARTS; j++) {
      const u32 d = 32 * j + 8 * member;
      of[j] = exists ? load_new(from + d) : zero;
      if constexpr (LOADS) loaded[j] = exists && d < ROTARY ? load_new(from + other(d)) : zero;
    }
  }
  // Normed and turned, part by part, to who takes it. All four members of a group must come.
  template <bool Norms, class Take>
  __device__ __forceinline__ void turn(const Angles& angles, const u16* norm, float epsilon, float offset, u32 member,
                                       const Take& take) const {
    float factor = 1;
    if constexpr (Norms) {
      float squares = 0;
#pragma unroll
      for (u32 j = 0; j < KEY_PARTS; j++)
#pragma unroll
        for (u32 i = 0; i < 8; i++) squares += number_at(of[j], i) * number_at(of[j], i);
      squares += __shfl_xor_sync(~0u, squares, 1);
      squares += __shfl_xor_sync(~0u, squares, 2);
      factor = rsqrtf(squares / SIZE + epsilon);
    }
    uint4 weights[Norms ? KEY_PARTS : 1];
    if constexpr (Norms)
#pragma unroll
      for (u32 j = 0; j < KEY_PARTS; j++) weights[j] = load_settled(norm + 32 * j + 8 * member);
#pragma unroll
    for (u32 j = 0; j < KEY_PARTS; j++) {
      const u32 d = 32 * j + 8 * member;
      uint4 of_others;
      if constexpr (Norms) of_others = LOADS ? load_settled(norm + other(d)) : weights[other(32 * j) / 32];
      float number[8];
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        float x = number_at(of[j], i), y = number_at(others(j), i);
        if constexpr (Norms) {
          x *= factor * (offset + number_at(weights[j], i));
          y *= factor * (offset + number_at(of_others, i));
        }
        const float turned = x * number_at(angles.cos[j], i) + (d < ROTARY / 2 ? -y : y) * number_at(angles.sin[j], i);
        number[i] = d < ROTARY ? turned : x;
      }
      take(j, make_uint4(pack(number[0], number[1]), pack(number[2], number[3]), pack(number[4], number[5]),
                         pack(number[6], number[7])));
    }
  }
};
// Brings a norm's weights to L2.
__device__ __forceinline__ void fetch(const u16* norm, u32 lane) {
  if (lane < SIZE / 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + 64 * lane));
}

// A new token's key and value, as lane (group, member) of the warp whose blocks have its slot makes them of token
// number `group`. They wait in shared memory for the block's turn, and go into the cache.
struct Fresh {
  Head key;
  uint4 value[KEY_PARTS];
  u32 number;
  bool ours;
  __device__ __forceinline__ void load(const Arguments& a, const Text& text, u32 part, u32 which, u32 head, u32 group,
                                       u32 member) {
    number = group < NEW ? group : 0;
    const u32 token = text.own + number;
    ours = group < NEW && token < text.behind_own && text.turn_of(token) % text.parts == part;
    key.load(a.new_keys + which * a.new_key_text + head * a.new_key_head + number * a.new_key_new, ours, member);
    const u16* from = a.new_values + which * a.new_value_text + head * a.new_value_head + number * a.new_value_new;
#pragma unroll
    for (u32 j = 0; j < KEY_PARTS; j++) value[j] = ours ? load_new(from + 32 * j + 8 * member) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void put(const Arguments& a, const Text& text, const Angles& angles, u16* own, bool writes,
                                      u32 member) const {
    const bool stores = ours & writes & text.has_slot();
    key.turn<Config::key_norm>(angles, a.key_norm, a.key_epsilon, a.offset, member, [&](u32 j, uint4 turned) {
      const u32 place = 32 * j + 8 * member;
      if (ours) *reinterpret_cast<uint4*>(own + number * SIZE + place) = turned;
      if (stores) *reinterpret_cast<uint4*>(text.keys + text.place_of_new(number) + place) = turned;
    });
    if (ours)
#pragma unroll
      for (u32 j = 0; j < KEY_PARTS; j++) {
        const u32 place = 32 * j + 8 * member;
        *reinterpret_cast<uint4*>(own + (NEW + number) * SIZE + place) = value[j];
        if (stores) *reinterpret_cast<uint4*>(text.values + text.place_of_new(number) + place) = value[j];
      }
    __syncwarp();
  }
};
// New tokens take their places in a block.
__device__ __forceinline__ void replace(const Text& text, Keys& keys, const u16* own, u32 base, u32 group, u32 member) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 token = base + group + 8 * half;
    if (!text.is_own(token)) continue;
#pragma unroll
    for (u32 j = 0; j < KEY_PARTS; j++)
      keys.of[half][j] = *reinterpret_cast<const uint4*>(own + (token - text.own) * SIZE + 32 * j + 8 * member);
  }
}
__device__ __forceinline__ void replace(const Text& text, Values& values, const u16* own, u32 base, u32 group,
                                        u32 member) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 token = base + Values::token(i, group, member);
    if (!text.is_own(token)) continue;
#pragma unroll
    for (u32 j = 0; j < VALUE_PARTS; j++)
      values.of[i][j] = *reinterpret_cast<const uint4*>(own + (NEW + token - text.own) * SIZE + 64 * j + 8 * group);
  }
}
