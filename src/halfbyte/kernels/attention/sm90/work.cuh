// What a launch and a text are, and the words that the rest is written in.

#include "linear/device/mma.cuh"
#include "linear/device/partials.cuh"
#include "linear/device/pipeline.cuh"
#include "linear/device/ring.cuh"

constexpr u32 SIZE = Config::size, NEW = Config::fresh, ROWS = Config::group * NEW, COLUMNS = Config::columns;
constexpr u32 ROW_TILES = (ROWS + 8 * COLUMNS - 1) / (8 * COLUMNS), TOKEN_WARPS = Config::token_warps;
constexpr u32 WARPS = ROW_TILES * TOKEN_WARPS, THREADS = 32 * WARPS;
constexpr u32 KEY_PARTS = SIZE / 32, VALUE_PARTS = SIZE / 64, SUM_TILES = SIZE / 16, BLOCK = 16;
constexpr bool AHEAD = SIZE * COLUMNS <= 128;  // registers hold keys and values of a block at once
// Of larger heads keys and values of blocks wait in shared memory, so many halves of blocks of each warp.
constexpr bool WAITS = SIZE > 128;
constexpr u32 HALVES = WAITS ? 3 : 0, HALF_BYTES = 2 * BLOCK * SIZE;
static_assert(!WAITS || (Config::page == 0 && COLUMNS == 1), "plan.py has no others");
// CTAs that share a head of keys of a text, at most: a cluster, or those that meet in memory, as helpers do, share.cuh.
constexpr u32 CLUSTER = Config::in_memory ? 1 : Config::ctas, HELPERS = Config::helpers;
constexpr u32 CTAS = HELPERS > 0 ? 32 : Config::ctas;
constexpr bool IN_MEMORY = CTAS > CLUSTER, EXCHANGES = IN_MEMORY && HELPERS == 0;  // see in_memory.cuh
// Pairs of sums of a lane, and how many of them a CTA of the cluster adds up.
constexpr u32 PAIRS = 2 * SUM_TILES * COLUMNS, SLOTS = (PAIRS + CLUSTER - 1) / CLUSTER;
constexpr u32 ROTARY = Config::rotary;
constexpr u32 PAGE = Config::page, DIVISOR = PAGE > 0 ? PAGE : 1;
static_assert(PAGE % BLOCK == 0, "a block lies within a page");
static_assert(PAGE == 0 || NEW == 1, "of a text in pages, the last token is new");
constexpr float LOG2E = 1.4426950408889634f;
#define NONE __uint_as_float(0xff800000)  // -inf

extern __shared__ __align__(16) unsigned char memory[];

struct Arguments {
  const u16 *query, *new_keys, *new_values, *cos, *sin, *query_norm, *key_norm;
  const long long* slot;  // of pages, one of each text
  u16 *keys, *values;
  const u8* mask;
  const int *spans, *pages;  // of pages, `spans` are the lengths of texts
  const void* sinks;
  float2* sums;   // that CTAs leave for others
  float4* stale;  // those of the launch before, which this one overwrites with SENTINEL
  int* counters;  // of texts in pages and heads, zeros
  u16* out;
  // From one to the next, in numbers.
  long long query_text, query_head, query_new, key_text, key_head, value_text, value_head, mask_text, mask_new;
  long long new_key_text, new_key_head, new_key_new, new_value_text, new_value_head, new_value_new, cos_text, cos_new;
  long long pages_text, page_step, token_step, stale_count;
  u32 tokens, heads, spans_text, window;
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
// Counts up, which comes behind all that the CTA has written, and before all that it reads.
__device__ __forceinline__ u32 count(int* counter) {
  u32 before;
  asm volatile("fence.acq_rel.gpu;\natom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
__device__ __forceinline__ float weight_of(float score, float highest) {
  return exp2f(score - (highest == NONE ? 0.f : highest));  // NONE: nothing seen yet
}

// The tokens of a text in pages that its new one sees, and the blocks where they are.
struct Seen {
  u32 first = 0, end;
  __device__ Seen(const Arguments& a, u32 text) : end(min(u32(max(settled(a.spans + text), 0)), a.tokens)) {
    if (a.window > 0 && a.window < end) first = end - a.window;
  }
  __device__ u32 blocks() const { return (end + BLOCK - 1) / BLOCK - first / BLOCK; }
};

// What a lane knows of its text. Conditions of a token take no branches.
struct Text {
  u16 *keys, *values;
  const u8* mask;
  const int* pages;
  long long page_step, token_step, slot;
  u32 first, end;       // of the tokens that are seen
  u32 own, behind_own;  // slots of new tokens, which are not read
  u32 begin, blocks;    // the first block, and how many there are
  u32 turn_of_last;     // when the last block comes
  u32 parts;            // warps that share the blocks

  __device__ Text(const Arguments& a, u32 text, u32 head, u32 ctas) : parts(ctas * TOKEN_WARPS) {
    keys = a.keys + text * a.key_text + head * a.key_head;
    values = a.values + text * a.value_text + head * a.value_head;
    mask = a.mask + text * a.mask_text * (Config::mask == 2 ? 2 : 1);
    pages = a.pages + text * a.pages_text, page_step = a.page_step, token_step = a.token_step;
    slot = PAGE > 0 && Config::puts ? settled(a.slot + text) : 0;
    first = 0, end = a.tokens;
    if constexpr (PAGE > 0) {
      const Seen seen(a, text);
      first = seen.first, end = seen.end;
    } else if constexpr (Config::spans) {  // a caller's own may say more than there is
      first = max(settled(a.spans + text * a.spans_text), 0);
      end = min(u32(max(settled(a.spans + text * a.spans_text + 1), 0)), a.tokens);
    }
    own = behind_own = 0;
    u32 from = first, to = end;
    if constexpr (PAGE > 0 && Config::puts) {
      own = max(end, 1u) - 1, behind_own = end;
    } else if constexpr (Config::puts) {
      own = u32(min(u64(settled(a.slot)), u64(a.tokens))), behind_own = min(own + NEW, a.tokens);
      if (own < behind_own) from = first < end ? min(first, own) : own, to = max(end, behind_own);
    }
    begin = from / BLOCK;
    blocks = from < to ? (to + BLOCK - 1) / BLOCK - begin : 0;
    // Warps take blocks in turn, one after the other. But who has new tokens has them to turn first. So where the last
    // block has all of them, it comes when each warp has its first one, the last of these, who has the fewest blocks.
    const bool moves = (own < behind_own) & (own / BLOCK - begin + 1 == blocks);
    turn_of_last = (moves ? min(parts, blocks) : blocks) - 1;
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
    return own < behind_own && (turn_of(own) % parts == part || turn_of(behind_own - 1) % parts == part);
  }
  __device__ bool is_own(u32 token) const { return Config::puts & (own <= token) & (token < behind_own); }
  __device__ bool is_known(u32 token) const { return (first <= token) & (token < end); }
  __device__ bool is_in_cache(u32 token) const { return is_known(token) & !is_own(token); }
  // The page of the block whose turn it is, and where a token of a page lies, from `keys` and `values` on.
  __device__ u32 page_at(u32 turn) const {
    if constexpr (PAGE > 0) return turn < blocks ? settled(pages + token_at(turn) / DIVISOR) : 0;
    else return 0;
  }
  __device__ auto place(u32 token, u32 page) const {
    if constexpr (PAGE > 0) return page * page_step + token % DIVISOR * token_step;
    else return token * SIZE;
  }
  // Likewise, where a new token goes. Of a cache in pages its slot says so, below 0 that it goes nowhere.
  __device__ bool has_slot() const { return PAGE == 0 || slot >= 0; }
  __device__ auto place_of_new(u32 number) const {
    if constexpr (PAGE > 0) return u64(slot) / DIVISOR * page_step + u64(slot) % DIVISOR * token_step;
    else return (own + number) * SIZE;
  }
};
