// What a launch and a text are, and the words that the rest is written in.

#include "linear/device/mma.cuh"
#include "linear/device/ptx.cuh"

constexpr u32 SIZE = Config::size, NEW = Config::fresh, ROWS = Config::group * NEW, COLUMNS = Config::columns;
constexpr u32 ROW_TILES = (ROWS + 8 * COLUMNS - 1) / (8 * COLUMNS), TOKEN_WARPS = Config::token_warps;
constexpr u32 WARPS = ROW_TILES * TOKEN_WARPS, THREADS = 32 * WARPS, PARTS = TOKEN_WARPS * Config::cluster;
constexpr u32 KEY_PARTS = SIZE / 32, VALUE_PARTS = SIZE / 64, SUM_TILES = SIZE / 16, BLOCK = 16;
constexpr bool AHEAD = SIZE * COLUMNS <= 128;  // registers hold keys and values of a block at once
// Pairs of sums of a lane, and how many of them a CTA of the cluster adds up.
constexpr u32 SHARES = 2 * SUM_TILES * COLUMNS, SLOTS = (SHARES + Config::cluster - 1) / Config::cluster;
constexpr u32 ROTARY = Config::rotary;
// Bytes of shared memory: keys and values of new tokens, pairs of sums, and of each row the highest score and the
// weights.
constexpr u32 SUMS = Config::puts ? 4 * ROW_TILES * NEW * SIZE : 0, STATISTICS = SUMS + SLOTS * ROW_TILES * PARTS * 256;
static_assert(STATISTICS + ROW_TILES * PARTS * COLUMNS * 64 == Config::shared_bytes, "launch.py asks for as much");
constexpr float LOG2E = 1.4426950408889634f;
#define NONE __uint_as_float(0xff800000)  // -inf

extern __shared__ __align__(16) unsigned char memory[];

struct Arguments {
  const u16 *query, *new_keys, *new_values, *cos, *sin, *query_norm, *key_norm;
  const long long* slot;
  u16 *keys, *values;
  const u8* mask;
  const int* spans;
  const void* sinks;
  u16* out;
  // From one to the next, in numbers.
  long long query_text, query_head, query_new, key_text, key_head, value_text, value_head, mask_text, mask_new;
  long long new_key_text, new_key_head, new_key_new, new_value_text, new_value_head, new_value_new, cos_text, cos_new;
  u32 tokens, heads, span_width;
  float scale, cap, lowest, query_epsilon, key_epsilon, offset;
};

// What the kernel ahead does not write, if this one may begin `early`. A plain load: one by __ldg may be moved across
// the wait, either way.
template <class T> __device__ __forceinline__ T settled(const T* from) { return *from; }
__device__ __forceinline__ uint4 load_settled(const u16* from) { return settled(reinterpret_cast<const uint4*>(from)); }
__device__ __forceinline__ uint4 load_new(const u16* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ __forceinline__ u32 word_of(uint4 four, u32 i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}
__device__ __forceinline__ float number_at(uint4 eight, u32 i) {
  const u32 word = word_of(eight, i / 2);
  return unpack(i % 2 ? word >> 16 : word & 0xffff);
}
// A matrix of eight by eight numbers of 16 bits: lane (group, member) gives row group and gets column group.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
// Places in shared memory.
__device__ __forceinline__ u32 sums_at(u32 slot, u32 tile, u32 part, u32 lane) {
  return SUMS + (((slot * ROW_TILES + tile) * PARTS + part) * 32 + lane) * 8;
}
__device__ __forceinline__ u32 statistics_at(u32 tile, u32 part, u32 row) {
  return STATISTICS + ((tile * PARTS + part) * 8 * COLUMNS + row) * 8;
}
__device__ __forceinline__ float2 given(u32 place) { return *reinterpret_cast<const float2*>(memory + place); }
__device__ __forceinline__ void give_to(u32 address, u32 rank, float2 pair) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in(address, rank)), "f"(pair.x), "f"(pair.y)
               : "memory");
}
__device__ __forceinline__ void give(u32 place, u32 rank, float2 pair) {  // to a CTA of the cluster
  if constexpr (Config::cluster == 1) *reinterpret_cast<float2*>(memory + place) = pair;
  else give_to(u32(__cvta_generic_to_shared(memory)) + place, rank, pair);
}
__device__ __forceinline__ float weight_of(float score, float highest) {
  return exp2f(score - (highest == NONE ? 0.f : highest));  // NONE: nothing seen yet
}

// What a lane knows of its text.
struct Text {
  u16 *keys, *values;
  const u8* mask;
  u32 first, end;       // of the tokens that are seen
  u32 own, behind_own;  // slots of new tokens, which are not read
  u32 begin, blocks;    // the first block, and how many there are
  u32 turn_of_last;     // when the last block comes

  __device__ Text(const Arguments& a, u32 text, u32 head) {
    keys = a.keys + text * a.key_text + head * a.key_head;
    values = a.values + text * a.value_text + head * a.value_head;
    mask = a.mask + text * a.mask_text * (Config::mask == 2 ? 2 : 1);
    first = 0, end = a.tokens;
    if constexpr (Config::spans) {  // a caller's own may say more than there is
      first = max(settled(a.spans + text * a.span_width), 0);
      end = min(u32(max(settled(a.spans + text * a.span_width + 1), 0)), a.tokens);
    }
    own = behind_own = 0;
    u32 from = first, to = end;
    if constexpr (Config::puts) {
      own = u32(min(u64(settled(a.slot)), u64(a.tokens))), behind_own = min(own + NEW, a.tokens);
      if (own < behind_own) from = first < end ? min(first, own) : own, to = max(end, behind_own);
    }
    begin = from / BLOCK;
    blocks = from < to ? (to + BLOCK - 1) / BLOCK - begin : 0;
    // Warps take blocks in turn, one after the other. But who has new tokens has them to turn first. So where the last
    // block has all of them, it comes when each warp has its first one, the last of these, who has the fewest blocks.
    const bool moves = own < behind_own && own / BLOCK - begin + 1 == blocks;
    turn_of_last = (moves ? min(PARTS, blocks) : blocks) - 1;
  }
  // The first token of the block whose turn it is, and when a block's turn is.
  __device__ u32 token_at(u32 turn) const {
    const u32 block = turn == turn_of_last ? blocks - 1 : turn - (turn_of_last < turn && turn < blocks);
    return BLOCK * (begin + block);
  }
  __device__ u32 turn_of(u32 token) const {
    const u32 block = token / BLOCK - begin;
    return block + 1 == blocks ? turn_of_last : block + (turn_of_last <= block);
  }
  // Whether a warp's blocks have slots of new tokens.
  __device__ bool has_own(u32 part) const {
    return own < behind_own && (turn_of(own) % PARTS == part || turn_of(behind_own - 1) % PARTS == part);
  }
  __device__ bool is_own(u32 token) const { return Config::puts && own <= token && token < behind_own; }
  __device__ bool is_known(u32 token) const { return first <= token && token < end; }
};
