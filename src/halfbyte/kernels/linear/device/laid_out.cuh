// What kernels for which x is laid out are told, and how they store y. Their Config has `activation`, `residual`, and
// `grouped`, for experts: see device/grouped.cuh, which has a use of its own for `other` and `m`. With `copies_x` x is
// copied as it is, by a tensor map of its own. With `norm` x is normed as it is laid out.
//
// With `next_tile_m` a pair's result is laid out for the product that reads it.
//
// A result may be combined with what an earlier launch left: y = other + result_scale * v with `residual`, or
// y = activation(other) * v, where `other` is the product of the weight that gates. With `paired` one launch has both.

#include "epilogue.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"

template <bool Copied> struct MapOfX {};
template <> struct MapOfX<true> {
  alignas(64) unsigned char x_map[128];
};
__device__ __forceinline__ u64 map_of_x(const MapOfX<false>&) { return 0; }
__device__ __forceinline__ u64 map_of_x(const MapOfX<true>& a) { return reinterpret_cast<u64>(a.x_map); }

struct Arguments : MapOfX<Config::copies_x> {
  // Of experts, whether it pays to ask a tile ahead for the tile that comes next, and for where its results go. Wide
  // tiles have hardly the registers.
  static constexpr bool KNOWS_NEXT = Config::tile_m <= 192,
                        ASKS_AHEAD = Config::tile_m <= 80 || Config::tile_m == 160 || Config::tile_m == 192;
  alignas(64) unsigned char map[128];  // the tensor map of packed
  const void* scale;
  const float *code, *absmax, *offset;
  const unsigned short *x, *bias;  // bias: null for none
  unsigned short* y;
  uint4* laid_out;
  float4* workspace;            // all SENTINEL before this launch
  float4* stale;                // sums of the launch before, which this one overwrites with SENTINEL
  const unsigned short* other;  // [m, n], or null; with Config::norm the norm's weights [k]
  // depth_units: units of 256 along K. ctas: that share the units, or clusters. first_cta: the number of their first.
  u32 stale_count, m, n, k, row_tiles, column_tiles, depth_units, ctas, first_cta;
  float unit, result_scale, epsilon, norm_offset, codebook[16];
};

__device__ __forceinline__ u64 map_of(const Arguments& a) { return reinterpret_cast<u64>(a.map); }

// Sums of `stale`. Products with experts share none, and have something else there (device/grouped.cuh).
__device__ __forceinline__ u32 count_stale(const Arguments& a) { return Config::grouped ? 0 : a.stale_count; }

// What a launch is told: of each weight that it multiplies x with. CTAs are dealt out to them, and each has one; but
// with `paired` these are gate and up, and all CTAs work on both.
struct Launched {
  Arguments part[Config::parts];
};
// That of the weight of CTA number `cta`.
__device__ __forceinline__ const Arguments& part_of(const Launched& launched, u32 cta) {
  u32 part = 0;
  if constexpr (Config::parts > 1 && !Config::paired)
    for (int i = 1; i < Config::parts; i++) part += cta >= launched.part[i].first_cta;
  return launched.part[part];
}
__device__ __forceinline__ u32 count_ctas(const Launched& launched) {
  const Arguments& last = launched.part[Config::parts - 1];
  return last.first_cta + last.ctas;
}

constexpr bool GATED = Config::activation != Activation::none && !Config::paired;  // by a launch of its own
static_assert(!Config::norm || (!GATED && !Config::residual && !Config::grouped), "`other` has the norm's weights");
static_assert(!Config::paired || (Config::parts == 2 && !Config::residual && !Config::grouped), "gate and up");
static_assert(!GATED || !Config::residual, "there is one other operand");
static_assert(Config::next_tile_m == 0 || Config::paired, "what a pair gives is laid out for the next product");

// Of x: the j-th of `member`'s two rows of group i of a tile.
__device__ __forceinline__ u32 row_of_x(const WorkUnit& at, u32 i, u32 member, u32 j) {
  return own_column_tile(at) * Config::tile_m + 8 * i + 2 * member + j;
}

__device__ __forceinline__ float combined(const Arguments& a, float value, u32 other) {
  if constexpr (GATED) return activated<Config::activation>(unpack(other)) * value;
  if constexpr (Config::residual) return fmaf(a.result_scale, value, unpack(other));
  return value;
}

// What this lane's sums of a tile are combined with, once the kernel ahead is done. All of it is asked for before
// anything is stored: results may be where it is, so that no load could go past a store, and each would wait for memory
// by itself.
constexpr bool COMBINES = GATED || Config::residual;
struct Others {
  u32 two[COMBINES ? Config::tile_m / 4 : 1];
};
template <bool Even, class Owns>
__device__ __forceinline__ Others load_others_of(const Arguments& a, const WorkUnit& at, u32 n, u32 member,
                                                 const Owns& owns) {
  Others found = {};
#pragma unroll
  for (u32 i = 0; COMBINES && i < Config::tile_m / 8; i++) {
    if (!owns(i)) continue;
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 m = row_of_x(at, i, member, j);
      found.two[2 * i + j] = load_two_if<Even>(m < a.m && n < a.n, a.other + u64(m) * a.n + n, n + 1 < a.n);
    }
  }
  return found;
}
template <class Owns>
__device__ __forceinline__ Others load_others(const Arguments& a, const WorkUnit& at, u32 n, u32 member,
                                              const Owns& owns) {
  return a.n % 2 == 0 ? load_others_of<true>(a, at, n, member, owns) : load_others_of<false>(a, at, n, member, owns);
}

template <bool Even, int Sums, class Owns>
__device__ __forceinline__ void store_tile_of(const Arguments& a, const float (&total)[Sums], const Others& others,
                                              const WorkUnit& at, u32 n, u32 member, const Owns& owns) {
  const bool exists = n < a.n, both = n + 1 < a.n;
  float bias[2] = {0, 0};
  if (a.bias) bias[0] = unpack(load_if(exists, a.bias + n)), bias[1] = unpack(load_if(both, a.bias + n + 1));
#pragma unroll
  for (u32 i = 0; i < Config::tile_m / 8; i++) {
    if (!owns(i)) continue;
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 m = row_of_x(at, i, member, j), other = others.two[COMBINES ? 2 * i + j : 0];
      const float first = combined(a, scale_and_add(total[4 * i + j], a.unit, bias[0]), other);
      const float second = combined(a, scale_and_add(total[4 * i + 2 + j], a.unit, bias[1]), other >> 16);
      store_two_if<Even>(exists && m < a.m, a.y + u64(m) * a.n + n, make_float2(first, second), both);
    }
  }
}
// Stores this lane's sums of a tile: rows n and n + 1 of W, and of x `member`'s of those groups of eight that it owns.
template <int Sums, class Owns>
__device__ __forceinline__ void store_tile(const Arguments& a, const float (&total)[Sums], const Others& others,
                                           const WorkUnit& at, u32 n, u32 member, const Owns& owns) {
  if (a.n % 2 == 0) store_tile_of<true>(a, total, others, at, n, member, owns);
  else store_tile_of<false>(a, total, others, at, n, member, owns);
}

// Where number n of row m of the result goes, of `columns` numbers: in rows, or as the product that reads it wants it
// laid out (lay_out.cuh), in tiles of Config::next_tile_m rows and spans of Config::next_span.
__device__ __forceinline__ u64 place_of_result(u32 m, u32 n, u32 columns) {
  constexpr u32 TILE_M = Config::next_tile_m, WORDS = Config::next_span / 2, OWN = Config::next_span / 8;
  if constexpr (TILE_M == 0) return u64(m) * columns + n;
  const u32 row = m % max(TILE_M, 1u), tile = m / max(TILE_M, 1u), word = n % 64 / 2;
  const u32 piece = word / WORDS * OWN + word % OWN, member = word % WORDS / OWN;
  return ((u64(tile) * (columns / 64) + n / 64) * TILE_M + row) * 64 + ((piece ^ row & 7) * 4 + member) * 2 + n % 2;
}

// With `paired`: row n of gate and of up, and of their results that of gate.
template <int Sums, class Owns>
__device__ __forceinline__ void store_gated(const Arguments& gate, const Arguments& up, const float (&total)[Sums],
                                            const WorkUnit& at, u32 n, u32 member, const Owns& owns) {
  const bool exists = n < gate.n;
  const float of_gate = gate.bias ? unpack(load_if(exists, gate.bias + n)) : 0;
  const float of_up = up.bias ? unpack(load_if(exists, up.bias + n)) : 0;
#pragma unroll
  for (u32 i = 0; i < Config::tile_m / 8; i++) {
    if (!owns(i)) continue;
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      const u32 m = row_of_x(at, i, member, j);
      const float first = scale_and_add(total[4 * i + j], gate.unit, of_gate);
      const float second = scale_and_add(total[4 * i + 2 + j], up.unit, of_up);
      const bool wanted = exists && m < gate.m;
      store_if(wanted, gate.y + place_of_result(m, n, gate.n), narrow(gated<Config::activation>(first, second)));
    }
  }
}
