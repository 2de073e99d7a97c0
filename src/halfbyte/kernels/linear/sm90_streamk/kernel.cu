// y[m, n] = sum over k of x[m, k] * W[n, k] on Hopper's tensor cores (wgmma), W in 4 bits, for any number of rows of x.
//
// Bytes moved: W's nibbles and scales once for each tile_m rows of x; x and y are small beside it. Flops: 2 M N K.
//
// W is the A operand and comes from registers, so out.T = W @ x.T: a register of A is two neighbouring k of one row,
// which is one packed byte, and nothing is repacked. K may be permuted within a span of weights that share a scale, as
// long as x is permuted alike: a thread takes neighbouring bytes, and `arrange` puts x into that order. A byte becomes
// two 16-bit numbers by one look-up in a table of 256 words with a copy for every lane: no bank conflicts, and the
// address is one byte permutation. The codebook comes multiplied by a factor that makes its rounding to 16 bits
// harmless; one over that factor (`unit`) goes into the result. Scales are applied in fp32 to the sums of each span, or
// of JOINED spans that share one.
//
// `arrange` lays x out in the swizzled tiles that wgmma reads, rows and k beyond the end filled up with zeros;
// `multiply` may start before it is done. Where all of its units are of one tile and there is stage for as much, a CTA
// lays its part of x out itself, once, and holds it (resident units); there is no `arrange` then, and `multiply` may
// start before the kernel ahead of it is done. The work is tiles of TILE_N rows of W by tile_m rows of x, cut along K
// into units of 256; every CTA takes an equal run of units. One warpgroup fetches bytes (tensor copies) and decodes
// scales; warpgroups warpgroups multiply, a warp 16 rows. A tile that several CTAs share is added up by the CTA that
// begins it, always in the order of K; or by all of them, some columns each, where they are a cluster (cluster of them,
// which lay_out_x x, and all of that tile). The same input gives the same bits.
//
// Needs sm_90a, units times CTAs below 2^32, K % 64 == 0
// (spans of 64) or K % 32 == 0 (spans of 32), packed aligned to 16 bytes.
// Macros: tile_m, warpgroups, stages, resident, cluster, direct (the most parts of a tile that its first CTA adds up
// one by one), span, x, scale, log_block, vector, low_first, shared_bytes, producer_registers, consumer_registers.

#include "fetch.cuh"

// What a thread reads of W and of its scales in a stage. Rows `row` (even) and `row` + 1, which are 128 bytes, their
// 16-byte pieces swizzled by the row: so the pieces of all spans differ from the first by an exclusive or.
struct Addresses {
  u32 upper, lower, scales;
  __device__ Addresses(u32 row, u32 member) {
    upper =
        row * 128 + (Config::span == 64 ? (member / 2 ^ row & 7) * 16 + member % 2 * 8 : (row & 7) * 16 + member * 4);
    lower = (upper ^ 16) + 128;
    scales = SCALE + row * 4;
  }
};

__device__ __forceinline__ void load(u32 (&words)[2], u32 at) {
  const uint2 pair = load_pair(at);
  words[0] = pair.x, words[1] = pair.y;
}
__device__ __forceinline__ void load(u32 (&words)[1], u32 at) { words[0] = load_number(at); }

// The A operands of a span for this thread. stage: where a stage begins.
__device__ __forceinline__ void decode(u32 (&a)[4 * STEPS], u32 stage, const Addresses& mine, int span, u32 column) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 at = stage + ((half ? mine.lower : mine.upper) ^ span * (Config::span / 2));
    u32 words[WORDS];
    load(words, at);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const u32 word = words[step / 2];
      a[4 * step + half] = step % 2 ? look_up<2>(word, column) : look_up<0>(word, column);
      a[4 * step + 2 + half] = step % 2 ? look_up<3>(word, column) : look_up<1>(word, column);
    }
  }
}

// The results of a tile; of a cluster's, one group of 8 columns in cluster.
__device__ __forceinline__ void store(const Arguments& a, const float (&total)[SUMS], const WorkUnit& at, u32 row,
                                      u32 member) {
  const u32 n = at.row_tile * TILE_N + row;
  if (n >= a.n) return;
  const bool both = n + 1 < a.n;
  float bias[2] = {0, 0};
  if (a.bias) {
    bias[0] = unpack(a.bias[n]);
    if (both) bias[1] = unpack(a.bias[n + 1]);
  }
#pragma unroll
  for (u32 i = 0; i < Config::tile_m / 8; i++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      if (!is_own(i)) continue;
      const u32 m = at.column_tile * Config::tile_m + 8 * i + 2 * member + j;
      if (m >= a.m) continue;
      const u32 word =
          pack(scale_and_add(total[4 * i + j], a.unit, bias[0]), scale_and_add(total[4 * i + 2 + j], a.unit, bias[1]));
      store_two(a.y + u64(m) * a.n + n, word, a.n % 2 == 0, both);
    }
}

__device__ __forceinline__ void multiply_units(const Arguments& a, u32 first, u32 last, u32 warp, u32 lane) {
  const u32 member = lane % 4, row = warp * 16 + lane / 4 * 2, column = column_of(shared(), lane);
  const Addresses mine(row, member);
  Ring ring(0);
  u32 resident = lower_half(BASE + X_RESIDENT);
  WorkUnit at(a, first);
  float total[SUMS], sum[SUMS];
  u32 even[4 * STEPS], odd[4 * STEPS];  // A operands of two spans: one is multiplied while the next is decoded
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i] = 0;
  wait(shared() + FULL, 0);
  decode(even, shared() + TILES, mine, 0, column);
  for (u32 unit = first; unit < last; unit++) {
    const u32 stage = shared() + TILES + ring.at * STAGE_BYTES, scales = shared() + ring.at * SCALE_BYTES;
    const u32 x = Config::resident ? resident : lower_half(stage + W_BYTES);
    resident += X_BYTES / 16;
    const u32 empty = shared() + EMPTY + 8 * ring.at;
    ring.next(Config::stages);
    auto turn = [&](const u32(&now)[4 * STEPS], u32(&next)[4 * STEPS], int span) __attribute__((always_inline)) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const u32 k = span * Config::span + step * 16;
        const u64 tile = descriptor(x + (k / 64 * (Config::tile_m * 128) + k % 64 * 2) / 16);
        multiply_add(sum, now[4 * step], now[4 * step + 1], now[4 * step + 2], now[4 * step + 3], tile,
                     step > 0 || span % JOINED > 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      const bool ends = span % JOINED == JOINED - 1;
      const uint2 scale = ends ? load_pair(mine.scales + scales + span / JOINED * TILE_N * 4) : make_uint2(0, 0);
      if (span + 1 < SPANS) {
        decode(next, stage, mine, span + 1, column);
      } else if (unit + 1 < last) {
        wait(shared() + FULL + 8 * ring.at, ring.parity);
        decode(next, shared() + TILES + ring.at * STAGE_BYTES, mine, 0, column);
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      const float upper = __uint_as_float(scale.x), lower = __uint_as_float(scale.y);
#pragma unroll
      for (int i = 0; ends && i < SUMS; i += 4) {
        total[i] += sum[i] * upper;
        total[i + 1] += sum[i + 1] * upper;
        total[i + 2] += sum[i + 2] * lower;
        total[i + 3] += sum[i + 3] * lower;
      }
    };
#pragma unroll
    for (int span = 0; span < SPANS; span += 2) turn(even, odd, span), turn(odd, even, span + 1);
    arrive(empty);
    if (at.depth + 1 == a.depth_units || unit + 1 == last) {
      if constexpr (Config::cluster > 1) {
        cluster_reduce<WARPS>(total, a, at, shared() + TILES, warp, lane);  // where bytes of W were
        store(a, total, at, row, member);
      } else {
        if (fix_up<Config::direct, WARPS>(total, a, at, own_number(), warp, lane)) store(a, total, at, row, member);
#pragma unroll
        for (int i = 0; i < SUMS; i++) total[i] = 0;
      }
    }
    at.next(a);
  }
}

// Lays out the rows of x for units `first` to `last`, all of one tile, as `arrange` would. A warp takes 8 rows by 64 of
// K.
__device__ __forceinline__ void lay_out_x(const Arguments& a, u32 first, u32 last, u32 warp, u32 lane) {
  constexpr u32 BATCH = Config::tile_m >= 32 || PRODUCERS_WAIT ? 8 : 4;  // pieces on their way at once
  const WorkUnit at(a, first);
  const u32 row = lane / 4, member = lane % 4, items = (last - first) * (UNIT_K / 64) * (Config::tile_m / 8);
  for (u32 item = warp; item < items; item += WARPS * BATCH) {
    uint4 words[BATCH][2];
#pragma unroll
    for (u32 j = 0; j < BATCH; j++)
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 number = item + j * WARPS,
                  m = at.column_tile * Config::tile_m + number % (Config::tile_m / 8) * 8 + row;
        const u32 k = at.depth * UNIT_K + number / (Config::tile_m / 8) * 64 +
                      (Config::span == 64 ? member * 16 + half * 8 : half * 32 + member * 8);
        const bool exists = number < items && m < a.m && k < a.k;
        words[j][half] = exists ? *reinterpret_cast<const uint4*>(a.x + u64(m) * a.k + k) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (u32 j = 0; j < BATCH; j++) {
      const u32 number = item + j * WARPS;
      if (number >= items) break;
      const u32 to = shared() + X_RESIDENT +
                     (number / (Config::tile_m / 8) * Config::tile_m + number % (Config::tile_m / 8) * 8 + row) * 128 +
                     member * 4;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 four[4] = {words[j][half].x, words[j][half].y, words[j][half].z, words[j][half].w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) store_word(to + (4 * half + i ^ row) * 16, four[i]);
      }
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // `wgmma` reads it by another way than it is written
  sync_x();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply(const __grid_constant__ Arguments a) {
  if ((u32(__cvta_generic_to_shared(memory)) & 0xffffff) != BASE) __trap();
  const u32 first = first_unit(a, own_number()), last = first_unit(a, own_number() + 1), lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, which the compiler could not know
  if (threadIdx.x == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(a.map) : "memory");
  if (warp >= WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::producer_registers));
    fetch(a, reinterpret_cast<u64>(a.map), first, last, threadIdx.x - 128 * Config::warpgroups);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::consumer_registers));
    make_table<WARPS>(shared(), a.codebook, Config::low_first, warp, lane);
    sync_all();
    if constexpr (Config::resident > 0) {
      wait_for_prior_kernel();
      lay_out_x(a, first, last, warp, lane);
    }
    multiply_units(a, first, last, warp, lane);
  }
}

// What `multiply` needs first. For each of its CTAs one of these brings scales nearer; the others lay x [m, k] out in
// tiles: [column tile][K / 64][tile_m rows][128 bytes, 16-byte pieces swizzled by the row]. Within a span, piece j
// holds for each member of a quad its word j, a word being two neighbouring k.
extern "C" __global__ void __launch_bounds__(128) arrange(const __grid_constant__ Arguments a) {
  // Only when all work ahead is done may `multiply` begin: it reads W at once, and waits for nothing but this kernel.
  wait_for_prior_kernel();
  launch_dependents();
  if (blockIdx.x < a.ctas) return prefetch_scales(a, blockIdx.x, threadIdx.x);
  const u32 index = (blockIdx.x - a.ctas) * 128 + threadIdx.x, pieces = a.column_tiles * a.depth_units * (X_BYTES / 16);
  if (index >= pieces) return;
  const u32 piece = index % 8, row = index / 8 % Config::tile_m, block = index / (8 * Config::tile_m),
            blocks = a.depth_units * 4;
  const u32 m = block / blocks * Config::tile_m + row, k = block % blocks * 64;
  const u32 word = piece / OWN * SPAN_WORDS + piece % OWN;
  u32 words[4];
#pragma unroll
  for (u32 member = 0; member < 4; member++) {
    const u32 at = k + 2 * (word + OWN * member);
    words[member] = m < a.m && at < a.k ? *reinterpret_cast<const u32*>(a.x + u64(m) * a.k + at) : 0;
  }
  a.arranged[u64(index) / 8 * 8 + (piece ^ (row & 7))] = make_uint4(words[0], words[1], words[2], words[3]);
}
