// A router: scores = x @ weight.T (+ bias) of each expert, the k best of each token, and their weights. x may be normed
// first, and is then written for the experts, too. One launch for up to eight tokens a cluster, where a norm, a product
// and a choice would be three.
//
// Bytes: the router's weight, once for every eight tokens, mostly from L2; it is fetched there while the kernel ahead
// ends. Flops: 2 T E K.
//
// Operands. scores.T = weight @ x.T by mma.m16n8k16 (linear/device/mma.cuh): 16 experts by eight tokens. A product's K
// may be permuted if both of its operands are, so a lane loads 16 bytes of a row, which are its part of two MMAs.
//
// Work. A cluster has eight tokens, and its CTAs take tiles of 16 experts in turn. The warps of a CTA take chunks of 32
// of K in turn; what they have is added up in the order of warps, rounded to x's type as `linear` rounds it, and sent
// to the CTA that has the token. There a warp chooses: ties go to the expert of the lower number, NaN is the highest.
// A norm needs all of a row: warps hold their part of x until they know the sums of squares of the others. So every CTA
// norms all eight tokens, and writes its own. With a norm, weights of both are loaded before the kernel ahead ends.
//
// Config: x; experts, k (of x), top_k; cluster; tiles, of a CTA; before, normalizes as in router_reference.py; bias,
// norm: whether there is one; narrow: weights are rounded to x's type, else fp32; overlaps: the kernel may begin before
// the one ahead has ended; mma_k: 16; shared_bytes.

#include "linear/device/mma.cuh"
#include "linear/device/pipeline.cuh"
#include "linear/device/rms_norm.cuh"

constexpr u32 TOKENS = 8, WARPS = 16, THREADS = 32 * WARPS, CHUNK = 32, CHUNKS = Config::k / CHUNK;
constexpr u32 TURNS = (CHUNKS + WARPS - 1) / WARPS, OF_CTA = (TOKENS + Config::cluster - 1) / Config::cluster;
// Turns whose loads are on their way before any is used, as registers allow; of x, which a norm needs at once, all.
constexpr u32 OF_TURN = 2 * Config::tiles;
constexpr u32 WANTED = Config::norm ? (TURNS < 15 ? 15 - TURNS : 1) / OF_TURN : 15 / (1 + OF_TURN);
constexpr u32 AHEAD = WANTED < 1 ? 1 : WANTED < TURNS ? WANTED : TURNS, X_TURNS = Config::norm ? TURNS : AHEAD;
constexpr u32 OF_LANE = (Config::experts + 31) / 32, SCORES = 4 * WARPS * Config::tiles * 128;  // bytes ahead of scores
constexpr u32 NORM = (SCORES + 4 * OF_CTA * Config::experts + 15) / 16 * 16;  // bytes ahead of its weights [k],
constexpr u32 SQUARES = NORM + 2 * Config::k;                                 // of [WARPS][TOKENS] sums,
constexpr u32 GIVEN = Config::norm ? SQUARES + 4 * WARPS * TOKENS : NORM;     // and of the scores' barrier
static_assert(GIVEN + (Config::cluster > 1 ? 16 : 0) == Config::shared_bytes, "choose.py asks for as much");
static_assert(!Config::norm || Config::k <= 8 * THREADS, "a thread loads eight weights of the norm");

extern __shared__ __align__(16) unsigned char memory[];

struct Arguments {
  const u16 *x, *weight, *bias, *norm;  // norm: its weights [k]
  long long* ids;                       // [tokens, top_k], as weights
  void* weights;
  u16* normed;  // [tokens, k]
  u32 tokens;
  float epsilon, norm_offset;
};

__device__ __forceinline__ void fetch_line(const u16* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ uint4 load_or_none(const u16* from, bool exists) {
  return exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ u32 address_of(u32 place) { return u32(__cvta_generic_to_shared(memory)) + place; }
// To the CTA of this rank, whose barrier counts it.
__device__ __forceinline__ void give_score(u32 place, u32 rank, float score) {
  if constexpr (Config::cluster == 1) *reinterpret_cast<float*>(memory + place) = score;
  else send_sum(address_in(address_of(place), rank), score, address_in(address_of(GIVEN), rank));
}
// Numbers in their order, NaN above all; 0 is below all.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value);
  return value != value ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}

// Norms what a lane has of a row of x. weights: this thread's eight of the norm's. at: of a turn, where it begins. to:
// where the row is written, or null.
template <class At>
__device__ __forceinline__ void norm_row(const Arguments& a, uint4* x, const uint4& weights, const At& at, u16* to) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = 0, other = 0;  // of every other word: half as long a chain
#pragma unroll
  for (u32 turn = 0; turn < TURNS; turn++) {
    sum = square_sum(x[turn].x, sum), other = square_sum(x[turn].y, other);
    sum = square_sum(x[turn].z, sum), other = square_sum(x[turn].w, other);
  }
  sum += other;
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  float* squares = reinterpret_cast<float*>(memory + SQUARES);
  if (lane % 4 == 0) squares[warp * TOKENS + lane / 4] = sum;
  // Does nothing, but the compiler does not know, unpacks x anew, and spares the registers of numbers kept till then.
  const u32 zero = a.tokens >> 31;
#pragma unroll
  for (u32 turn = 0; turn < TURNS; turn++) x[turn].x ^= zero, x[turn].y ^= zero, x[turn].z ^= zero, x[turn].w ^= zero;
  if (8 * threadIdx.x < Config::k) *reinterpret_cast<uint4*>(memory + NORM + 16 * threadIdx.x) = weights;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) sum += squares[w * TOKENS + lane / 4];
  const float factor = rsqrtf(sum / float(Config::k) + a.epsilon);
#pragma unroll
  for (u32 turn = 0; turn < TURNS; turn++) {
    if (at(turn) >= Config::k) continue;
    const uint4 w = *reinterpret_cast<const uint4*>(memory + NORM + 2 * at(turn));
    x[turn] = make_uint4(normed(x[turn].x, w.x, factor, a.norm_offset), normed(x[turn].y, w.y, factor, a.norm_offset),
                         normed(x[turn].z, w.z, factor, a.norm_offset), normed(x[turn].w, w.w, factor, a.norm_offset));
    if (to) *reinterpret_cast<uint4*>(to + at(turn)) = x[turn];
  }
}

// By one warp, of one token.
__device__ __forceinline__ void choose_of(const Arguments& a, const float* scores, u32 token, u32 lane) {
  float score[OF_LANE], highest = __uint_as_float(0xff800000);
  u32 left[OF_LANE];
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) {
    const u32 expert = 32 * i + lane;
    score[i] = expert < Config::experts ? scores[expert] : __uint_as_float(0xff800000);
    left[i] = expert < Config::experts ? ordered(score[i]) : 0;
    highest = fmaxf(highest, score[i]);
  }
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  float all = 0, share = 0;  // share: lane i has that of the choice number i
  u32 chosen = 0;
  if constexpr (Config::before) {
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) all += __expf(score[i] - highest);
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) all += __shfl_xor_sync(~0u, all, step);
  }
  for (u32 turn = 0; turn < Config::top_k; turn++) {
    u32 most = 0, at = 0;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++)
      if (left[i] > most) most = left[i], at = 32 * i + lane;
    const u32 best = __reduce_max_sync(~0u, most);
    const u32 expert = __reduce_min_sync(~0u, most == best ? at : ~0u);
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++)
      if (32 * i + lane == expert) left[i] = 0;
    if (lane == turn) chosen = expert;
  }
  if (lane < Config::top_k) share = __expf(scores[chosen] - highest);
  if constexpr (Config::before) share /= all;
  if constexpr (Config::normalizes || !Config::before) {
    float sum = 0;
    for (u32 turn = 0; turn < Config::top_k; turn++) sum += __shfl_sync(~0u, share, turn);
    share /= sum;
  }
  if (lane >= Config::top_k) return;
  const u64 to = u64(token) * Config::top_k + lane;
  a.ids[to] = chosen;
  if constexpr (Config::narrow) static_cast<u16*>(a.weights)[to] = narrow(share);
  else static_cast<float*>(a.weights)[to] = share;
}

extern "C" __global__ void __launch_bounds__(THREADS) choose(const __grid_constant__ Arguments a) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, member = lane % 4;
  const u32 rank = Config::cluster == 1 ? 0 : blockIdx.y, first = blockIdx.x * TOKENS;
  // Of tile i, this lane's rows are expert_of(i) and eight behind it.
  const auto expert_of = [&](u32 i) { return (i * Config::cluster + rank) * 16 + group; };
  const auto place_of = [&](u32 turn) { return (turn * WARPS + warp) * CHUNK + 8 * member; };
  if constexpr (Config::overlaps) {
#pragma unroll
    for (u32 i = 0; i < Config::tiles; i++)
#pragma unroll
      for (u32 turn = 0; turn < TURNS; turn++)
        if (const u32 expert = expert_of(i) + 8 * (member / 2);
            member % 2 == 0 && expert < Config::experts && place_of(turn) < Config::k)
          fetch_line(a.weight + u64(expert) * Config::k + place_of(turn));
  }
  if constexpr (Config::cluster > 1) {
    if (threadIdx.x == 0) {  // of its tokens it gets all scores
      init(address_of(GIVEN), 1);
      publish_barriers();
      expect(address_of(GIVEN), (TOKENS - rank + Config::cluster - 1) / Config::cluster * Config::experts * 4);
    }
    __syncwarp();
    arrive_cluster();  // all have begun before anything is sent
  }

  // Of x some turns, and then of each turn a tile's two rows after the other.
  uint4 pieces[X_TURNS + AHEAD * OF_TURN];
  const auto load_weight = [&](u32 begin) {
#pragma unroll
    for (u32 turn = 0; turn < AHEAD; turn++)
#pragma unroll
      for (u32 i = 0; i < Config::tiles; i++) {
        const u32 at = place_of(begin + turn), expert = expert_of(i);
        const u16* from = a.weight + u64(expert) * Config::k + at;
        uint4* to = pieces + X_TURNS + turn * OF_TURN + 2 * i;
        to[0] = load_or_none(from, at < Config::k && expert < Config::experts);
        to[1] = load_or_none(from + 8 * Config::k, at < Config::k && expert + 8 < Config::experts);
      }
  };
  const auto load_x = [&](u32 begin) {
#pragma unroll
    for (u32 turn = 0; turn < X_TURNS; turn++) {
      const u32 at = place_of(begin + turn);
      pieces[turn] =
          load_or_none(a.x + u64(first + group) * Config::k + at, at < Config::k && first + group < a.tokens);
    }
  };
  uint4 norm;
  if constexpr (Config::norm) {
    norm = load_or_none(a.norm + 8 * threadIdx.x, 8 * threadIdx.x < Config::k);
    load_weight(0);
  }
  if constexpr (Config::overlaps) wait_for_prior_kernel(), launch_dependents();
  float sums[Config::tiles][4] = {};
#pragma unroll
  for (u32 begin = 0; begin < TURNS; begin += AHEAD) {
    if (!Config::norm || begin > 0) load_weight(begin);
    if (!Config::norm || begin == 0) load_x(begin);
    load_together(pieces, a.tokens >> 31);
    if constexpr (Config::norm) {
      const u32 token = first + group;
      const bool owns = token < a.tokens && group % Config::cluster == rank;
      if (begin == 0) norm_row(a, pieces, norm, place_of, owns ? a.normed + u64(token) * Config::k : nullptr);
    }
#pragma unroll
    for (u32 turn = 0; turn < AHEAD; turn++) {
      if (begin + turn >= TURNS) continue;
      const uint4 x = pieces[Config::norm ? begin + turn : turn];
#pragma unroll
      for (u32 i = 0; i < Config::tiles; i++) {
        const uint4* rows = pieces + X_TURNS + turn * OF_TURN + 2 * i;
        const uint4 upper = rows[0], lower = rows[1];
        mma(sums[i], upper.x, lower.x, upper.y, lower.y, x.x, x.y);
        mma(sums[i], upper.z, lower.z, upper.w, lower.w, x.z, x.w);
      }
    }
  }
  float* parts = reinterpret_cast<float*>(memory);  // [warp][tile][row of 16][token]
#pragma unroll
  for (u32 i = 0; i < Config::tiles; i++) {
    float* to = parts + (warp * Config::tiles + i) * 128 + group * 8 + 2 * member;
    to[0] = sums[i][0], to[1] = sums[i][1], to[64] = sums[i][2], to[65] = sums[i][3];
  }
  __syncthreads();
  if constexpr (Config::cluster > 1) wait_for_cluster();
  for (u32 i = threadIdx.x; i < Config::tiles * 128; i += THREADS) {
    const u32 expert = (i / 128 * Config::cluster + rank) * 16 + i % 128 / 8, token = i % 8;
    if (expert >= Config::experts) continue;
    float score = Config::bias ? unpack(a.bias[expert]) : 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) score += parts[w * Config::tiles * 128 + i];
    give_score(SCORES + 4 * (token / Config::cluster * Config::experts + expert), token % Config::cluster,
               unpack(narrow(score)));
  }
  if constexpr (Config::cluster > 1) wait(address_of(GIVEN), 0);
  else __syncthreads();
  const u32 token = first + warp * Config::cluster + rank;
  if (warp < OF_CTA && token < min(first + TOKENS, a.tokens))
    choose_of(a, reinterpret_cast<const float*>(memory + SCORES) + warp * Config::experts, token, lane);
}
