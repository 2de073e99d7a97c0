// Which pairs of a token and an expert are multiplied together.
//
// A unit is an expert and up to WIDTH of its pairs; an expert with more has several units. So a tile of W meets the
// tokens that want it, whatever they are, and an expert that nobody wants is not read. Each CTA finds the units for
// itself: its producer warp does, in a microsecond, and nothing has to be sorted, written or waited for.
// Pairs whose id is no expert belong to no unit.

#include "device/places.cuh"
#include "work.cuh"

__device__ __forceinline__ u32 expert_of(u32 shared, u32 unit) { return load_short(shared + UNIT_EXPERT + 2 * unit); }
// The pair in a column of a unit, or NOBODY.
__device__ __forceinline__ u32 pair_of(u32 shared, u32 unit, u32 column) {
  return load_short(shared + UNIT_PAIRS + 2 * (unit * WIDTH + column));
}

// An id, which with static_weights another kernel may have written just before this one began.
template <class Id> __device__ __forceinline__ Id load_id(const Id* from) {
  if constexpr (!Config::static_weights) return *from;
  Id id;
  if constexpr (sizeof(Id) == 8) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(id) : "l"(from));
  else asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(id) : "l"(from));
  return id;
}
// The experts of the pairs lane, 32 + lane, … or NOBODY. All loads go at once: none is behind a branch, and none is
// looked at before the last has been asked for.
template <class Id, u32 N>
__device__ __forceinline__ void load_experts(const Arguments& a, u32 (&expert)[N], u32 lane) {
  Id ids[N];
#pragma unroll
  for (u32 i = 0; i < N; i++) ids[i] = load_id(static_cast<const Id*>(a.ids) + min(32 * i + lane, a.pairs - 1));
#pragma unroll
  for (u32 i = 0; i < N; i++) expert[i] = 32 * i + lane < a.pairs && ids[i] < a.experts ? u32(ids[i]) : NOBODY;
}

// Zeros for the pairs that are nobody's, dealt out to the CTAs.
template <int N> __device__ __forceinline__ void clear_rows(const Arguments& a, const u32 (&expert)[N], u32 lane) {
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    u32 nobodys = __ballot_sync(~0u, 32 * i + lane < a.pairs && expert[i] == NOBODY);
    for (; nobodys; nobodys &= nobodys - 1) {
      const u32 pair = 32 * i + __ffs(nobodys) - 1;
      if (pair % gridDim.x != blockIdx.x) continue;
      uint4* row = reinterpret_cast<uint4*>(a.result[0].y + u64(pair) * a.expert_rows);
      for (u32 j = lane; j < a.expert_rows / 8; j += 32) row[j] = make_uint4(0, 0, 0, 0);
    }
  }
}

// The units of no more pairs than a warp has lanes, each of which has the pair of its number. Lanes of the same expert
// know of each other, so nothing is counted.
__device__ __forceinline__ void find_few_units(u32 shared, u32 expert, u32 lane) {
  const u32 alike = __match_any_sync(~0u, expert), before = (1u << lane) - 1, place = __popc(alike & before);
  const bool valid = expert != NOBODY, begins = valid && place % WIDTH == 0;
  const u32 firsts = __ballot_sync(~0u, begins);  // of units
  u32 rest = alike;                               // but those of the expert's units ahead
  for (u32 i = place / WIDTH * WIDTH; i > 0; i--) rest &= rest - 1;
  const u32 unit = __popc(firsts & ((rest & -rest) - 1));
  if (begins) {
    store_short(shared + UNIT_EXPERT + 2 * unit, expert);
    store_copies(shared + UNIT_PAIRS + 2 * WIDTH * unit, ~0u);
  }
  __syncwarp();
  if (valid) store_short(shared + UNIT_PAIRS + 2 * (WIDTH * unit + place % WIDTH), lane);
  if (lane == 0) store_word(shared + UNITS, __popc(firsts));
}

// Gives the pairs of an expert their places in the order of pairs.
template <u32 N>
__device__ __forceinline__ void put_in_order(u32 (&place)[N], const u32 (&expert)[N], u32 of, u32 lane) {
  u32 first = 0;
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    const u32 alike = __ballot_sync(~0u, expert[i] == of);
    if (expert[i] == of) place[i] = first + __popc(alike & (1u << lane) - 1);
    first += __popc(alike);
  }
}

// Of more. Additions may come in any order, and every CTA must find the same units, since each has its own tiles of
// them. That matters to experts with several units alone, so only those are put in order: few have more pairs.
constexpr u32 OF_LANE = ROUTED ? (Config::pairs + 31) / 32 : 1, EXPERTS = ROUTED ? Config::experts / 32 : 1;
__device__ __forceinline__ void find_many_units(u32 shared, const u32 (&expert)[OF_LANE], u32 lane) {
  u32 place[OF_LANE];
#pragma unroll
  for (u32 i = 0; i < EXPERTS; i++) store_word(shared + COUNT + 4 * (32 * i + lane), 0);
  __syncwarp();
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) place[i] = take_places(shared + COUNT + 4 * expert[i], 1, expert[i] != NOBODY);
  __syncwarp();
  // The units of a lane's experts, whose counts become the numbers of their first ones.
  u32 own[EXPERTS], all = 0;
#pragma unroll
  for (u32 i = 0; i < EXPERTS; i++) {
    own[i] = (load_number(shared + COUNT + 4 * (EXPERTS * lane + i)) + WIDTH - 1) / WIDTH;
    all += own[i];
  }
  u32 until = all;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0u, until, step);
    if (lane >= step) until += other;
  }
  const u32 units = __shfl_sync(~0u, until, 31);
  u32 first = until - all;
#pragma unroll
  for (u32 i = 0; i < EXPERTS; i++) {
    store_word(shared + COUNT + 4 * (EXPERTS * lane + i), first);
    for (u32 j = 0; j < own[i]; j++) store_short(shared + UNIT_EXPERT + 2 * first++, EXPERTS * lane + i);
  }
#pragma unroll
  for (u32 i = 0; i < EXPERTS; i++)
    for (u32 many = __ballot_sync(~0u, own[i] > 1); many; many &= many - 1)
      put_in_order(place, expert, EXPERTS * (__ffs(many) - 1) + i, lane);
  for (u32 i = lane; i < units * WIDTH / 2; i += 32) store_word(shared + UNIT_PAIRS + 4 * i, ~0u);
  __syncwarp();
  u32 unit[OF_LANE];
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) {
    const u32 from = expert[i] == NOBODY ? UNITS : COUNT + 4 * expert[i];
    unit[i] = load_number(shared + from);
  }
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) {
    const u32 column = (unit[i] + place[i] / WIDTH) * WIDTH + place[i] % WIDTH;
    if (expert[i] != NOBODY) store_short(shared + UNIT_PAIRS + 2 * column, 32 * i + lane);
  }
  if (lane == 0) store_word(shared + UNITS, units);
}

// By one warp; the others wait for it, so all of its loads go at once.
__device__ __forceinline__ void find_units(const Arguments& a, u32 shared, u32 lane) {
  u32 expert[OF_LANE];
  if (a.wide_ids) load_experts<u64>(a, expert, lane);
  else load_experts<u32>(a, expert, lane);
  if constexpr (OF_LANE == 1) find_few_units(shared, expert[0], lane);
  else find_many_units(shared, expert, lane);
  __syncwarp();
  if (a.clears && blockIdx.y == 0) clear_rows(a, expert, lane);
}
