// Which pairs of a token and an expert are multiplied together.
//
// A unit is an expert and up to WIDTH of its pairs, in their order; an expert with more has several units. So a tile of
// W meets the tokens that want it, whatever they are, and an expert that nobody wants is not read. Each CTA finds the
// units for itself: its producer warp does, in a microsecond, and nothing has to be sorted, written or waited for.
// Pairs whose id is no expert belong to no unit.

#include "work.cuh"

__device__ __forceinline__ u32 load_short(u32 address) {
  u16 value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_short(u32 address, u32 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(u16(value)) : "memory");
}

__device__ __forceinline__ u32 expert_of(u32 shared, u32 unit) { return load_short(shared + UNIT_EXPERT + 2 * unit); }
// The pair in a column of a unit, or NOBODY.
__device__ __forceinline__ u32 pair_of(u32 shared, u32 unit, u32 column) {
  return load_short(shared + UNIT_PAIRS + 2 * (unit * WIDTH + column));
}

// By one warp; the others wait for it.
__device__ __forceinline__ void find_units(const Arguments& a, u32 shared, u32 lane) {
  for (u32 e = lane; e < Config::experts; e += 32) store_word(shared + COUNT + 4 * e, 0);
  __syncwarp();
  // Each pair's place among those of its expert.
  for (u32 first = 0; first < a.pairs; first += 32) {
    const u32 pair = first + lane;
    u64 id = ~0ull;
    if (pair < a.pairs)
      id = a.wide_ids ? reinterpret_cast<const u64*>(a.ids)[pair] : u64(reinterpret_cast<const u32*>(a.ids)[pair]);
    const bool valid = id < a.experts;
    const u32 alike = __match_any_sync(~0u, valid ? u32(id) : NOBODY + 1 + lane);
    const u32 before = __popc(alike & (1u << lane) - 1), count = shared + COUNT + 4 * (valid ? u32(id) : 0);
    const u32 place = load_number(count) + before;
    __syncwarp();
    if (valid && before == 0) store_word(count, place + __popc(alike));
    if (pair < a.pairs) {
      store_short(shared + PAIR_EXPERT + 2 * pair, valid ? u32(id) : NOBODY);
      store_short(shared + PLACE + 2 * pair, place);
    }
    __syncwarp();
  }
  // The units of each expert, whose count becomes the number of its first one.
  u32 units = 0;
  for (u32 e = lane; e < Config::experts; e += 32) {
    const u32 own = (load_number(shared + COUNT + 4 * e) + WIDTH - 1) / WIDTH;
    u32 until = own;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += other;
    }
    const u32 first = units + until - own;
    for (u32 i = 0; i < own; i++) store_short(shared + UNIT_EXPERT + 2 * (first + i), e);
    store_word(shared + COUNT + 4 * e, first);
    units += __shfl_sync(~0u, until, 31);
  }
  for (u32 i = lane; i < units * WIDTH / 2; i += 32) store_word(shared + UNIT_PAIRS + 4 * i, ~0u);
  __syncwarp();
  for (u32 pair = lane; pair < a.pairs; pair += 32) {
    const u32 expert = load_short(shared + PAIR_EXPERT + 2 * pair), place = load_short(shared + PLACE + 2 * pair);
    if (expert == NOBODY) continue;
    const u32 unit = load_number(shared + COUNT + 4 * expert) + place / WIDTH;
    store_short(shared + UNIT_PAIRS + 2 * (unit * WIDTH + place % WIDTH), pair);
  }
  if (lane == 0) store_word(shared + UNITS, units);
  __syncwarp();
}
