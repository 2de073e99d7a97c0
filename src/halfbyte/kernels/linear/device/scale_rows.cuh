// Scales of rows of W, as a producer loads them: unit by unit, some units before they are used. The includer has
// TILE_ROWS (rows of W that a WorkUnit counts as one), UNIT_K (weights of a row a unit), SPANS (of a unit), JOINED
// (spans that share a scale) and UNIT_SCALES (of a row and unit); its Arguments have scale, absmax, n and k.

#include "scale.cuh"
#include "tile_rows.cuh"

// A thread must not wait for memory, so it loads the scales of its rows into registers units before they are used. By
// Config::loads:
//
//   one      one scale of a unit at a time
//   unit     those of a unit: 4, 8 or 16 bytes, aligned
//   vector   16 bytes, aligned, which last for LOADED units
//   across   16 bytes that begin anywhere, by two aligned loads; nested ones have two absmax at most
//
// A load is a line of L1 for every row. So one by one takes a producer as long as others take to multiply.
constexpr int BYTES = sizeof(ScaleBits),  // of a scale
    UNIT_BYTES = Config::loads != Loads::one ? (UNIT_K >> Config::log_block) * BYTES : SPANS * BYTES,
              LOAD_BYTES = Config::loads == Loads::vector || Config::loads == Loads::across ? 16 : UNIT_BYTES,
              LOADED = LOAD_BYTES / UNIT_BYTES;
static_assert(Config::loads == Loads::one || UNIT_BYTES == 4 || UNIT_BYTES == 8 || UNIT_BYTES == 16,
              "units begin at words");

// Volatile, so that the compiler leaves them before the copies of W, behind which they would queue for microseconds.
__device__ __forceinline__ float load_float(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}
__device__ __forceinline__ uint4 load_16_bytes(const void* from) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}
// The first LOAD_BYTES.
__device__ __forceinline__ uint4 load_bytes(const void* from) {
  if constexpr (LOAD_BYTES == 16) return load_16_bytes(from);
  uint4 value = make_uint4(0, 0, 0, 0);
  if constexpr (LOAD_BYTES == 8)
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  else asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value.x) : "l"(from));
  return value;
}
__device__ __forceinline__ u32 load_bits(const Arguments& a, u64 block) {
  return __ldg(static_cast<const ScaleBits*>(a.scale) + block);
}

// The number of the first scale that a load brings for `k` and a row; rows beyond N count as the last one, and those of
// experts are no such rows (row_of).
__device__ __forceinline__ u64 first_block(const Arguments& a, u32 row, u32 k) {
  return (u64(Config::grouped ? row : min(row, a.n - 1)) * a.k + k / (LOADED * UNIT_K) * (LOADED * UNIT_K)) >>
         Config::log_block;
}
__device__ __forceinline__ const unsigned char* address_of(const Arguments& a, u64 block) {
  return static_cast<const unsigned char*>(a.scale) + block * BYTES;
}

// Scales of a row as stored: those of LOADED units, which share an absmax. `settle` is called once before they are
// read, and may wait for memory.
struct VectorScales {
  uint4 bytes;
  float its_absmax;

  // k is rounded down to what one load brings.
  __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 k) {
    const u64 block = first_block(a, row, k);
    bytes = load_bytes(address_of(a, block));
    its_absmax = NESTED ? load_float(a.absmax + (block >> 8)) : 0.0f;
  }
  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void next_unit() {
    bytes = UNIT_BYTES == 4 ? make_uint4(bytes.y, bytes.z, bytes.w, 0) : make_uint4(bytes.z, bytes.w, 0, 0);
  }
  __device__ __forceinline__ u32 bits(int s) const {
    const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    const int byte = (s * JOINED * Config::span >> Config::log_block) * BYTES;
    return words[byte / 4] >> byte % 4 * 8;
  }
  __device__ __forceinline__ float absmax(int) const { return its_absmax; }
};

// The same, wherever they begin: `bytes` has those from the last multiple of 16 on, and `more` what follows. Neither
// load is without a byte of the row; the host sees to it that all scales end at a multiple of 16.
struct ScalesAcross : VectorScales {
  uint4 more;
  u32 place, rest;  // where they begin in `bytes`, and how many the row has, of 16 or more
  float next_absmax;
  int same;  // scales of this unit and those after it that have `its_absmax`, if they are nested

  __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 k) {
    const u64 block = first_block(a, row, k);
    const unsigned char* from = address_of(a, block);
    place = u32(reinterpret_cast<u64>(from)) % 16;
    rest = ((a.k - k / (LOADED * UNIT_K) * (LOADED * UNIT_K)) >> Config::log_block) * BYTES;
    bytes = load_16_bytes(from - place);
    more = place + min(rest, 16) > 16 ? load_16_bytes(from - place + 16) : make_uint4(0, 0, 0, 0);
    if constexpr (NESTED) {
      same = 256 - int(block % 256);
      its_absmax = load_float(a.absmax + (block >> 8));
      next_absmax = load_float(a.absmax + (block + min(rest, 16) - 1 >> 8));
    }
  }
  __device__ __forceinline__ void next_unit() {
    VectorScales::next_unit();
    same -= UNIT_K >> Config::log_block;
  }
  __device__ __forceinline__ float absmax(int s) const {
    return NESTED && (s * JOINED * Config::span >> Config::log_block) >= same ? next_absmax : its_absmax;
  }
  // What is beyond the row becomes zeros: x is zero there, but another row's NaN is not.
  __device__ __forceinline__ void settle() {
    u32 words[8] = {bytes.x, bytes.y, bytes.z, bytes.w, more.x, more.y, more.z, more.w};
#pragma unroll
    for (int step = 2; step > 0; step--)
#pragma unroll
      for (int i = 0; i + step < 8; i++) words[i] = place & 4 * step ? words[i + step] : words[i];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 word = __funnelshift_r(words[i], words[i + 1], place % 4 * 8);
      words[i] = rest >= 4 * i + 4 ? word : rest > 4 * i ? word & (1u << rest % 4 * 8) - 1 : 0;
    }
    bytes = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Scales of a row as stored, those of one unit, loaded one by one.
struct SingleScales {
  u32 each_bits[SPANS];
  float each_absmax[NESTED ? SPANS : 1];

  __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 k) {
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
      const bool exists = (Config::grouped || row < a.n) && k + s * Config::span < a.k;
      const u64 block = exists ? (u64(row) * a.k + k + s * Config::span) >> Config::log_block : 0;
      each_bits[s] = exists ? load_bits(a, block) : 0;
      if (NESTED) each_absmax[s] = exists ? __ldg(a.absmax + (block >> 8)) : 0.0f;
    }
  }
  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void next_unit() {}
  __device__ __forceinline__ u32 bits(int s) const { return each_bits[s]; }
  __device__ __forceinline__ float absmax(int s) const { return each_absmax[NESTED ? s : 0]; }
};

template <Loads> struct ScalesOf {
  typedef VectorScales Raw;
};
template <> struct ScalesOf<Loads::one> {
  typedef SingleScales Raw;
};
template <> struct ScalesOf<Loads::across> {
  typedef ScalesAcross Raw;
};
typedef ScalesOf<Config::loads>::Raw RawScales;

// Prefetches the scales that CTA number `cta` of `multiply`, or both twins of this number, load first to L2. Each is in
// a line of its own, and there are too many to arrive in time.
__device__ __forceinline__ void prefetch_scales(const Arguments& a, u32 cta, u32 thread) {
  const u32 first = first_unit(a, cta);
  if (Config::grouped && first == end_unit(a, cta)) return;
  const WorkUnit at(a, first);
  constexpr u32 ROWS = TILE_ROWS * Config::twins;
  for (u32 row = at.row_tile * ROWS + thread; row < (at.row_tile + 1) * ROWS; row += 128) {
    prefetch_to_l2(address_of(a, first_block(a, row_of(a, at, row), at.depth * UNIT_K)));
  }
}
