// Scales of rows of W, as a producer loads them: unit by unit, some units before they are used. The includer has
// TILE_ROWS (rows of W that a WorkUnit counts as one), UNIT_K (weights of a row a unit), SPANS (of a unit), JOINED
// (spans that share a scale) and UNIT_SCALES (of a row and unit); its Arguments have scale, absmax, n and k.

#include "scale.cuh"
#include "tile_rows.cuh"

// A thread must not wait for memory, so it loads the scales of its rows into registers units before they are used. With
// `vector` it loads 16 bytes of a row, which last for LOADED units; else one scale at a time.
constexpr int BYTES = sizeof(ScaleBits),  // of a scale
    UNIT_BYTES = Config::vector ? (UNIT_K >> Config::log_block) * BYTES : SPANS * BYTES,
              LOADED = Config::vector ? 16 / UNIT_BYTES : 1;
static_assert(!Config::vector || UNIT_BYTES == 4 || UNIT_BYTES == 8 || UNIT_BYTES == 16, "units begin at words");

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
__device__ __forceinline__ u32 load_bits(const Arguments& a, u64 block) {
  return __ldg(static_cast<const ScaleBits*>(a.scale) + block);
}

// The number of the first scale that a vector load brings for `k` and a row; rows beyond N count as the last one,
// and those of experts are no such rows (row_of).
__device__ __forceinline__ u64 first_block(const Arguments& a, u32 row, u32 k) {
  return (u64(Config::grouped ? row : min(row, a.n - 1)) * a.k + k / (LOADED * UNIT_K) * (LOADED * UNIT_K)) >>
         Config::log_block;
}

// Scales of a row as stored, by one vector load: those of LOADED units, in 16 bytes. They share an absmax.
struct VectorScales {
  uint4 bytes;
  float its_absmax;

  // k is rounded down to what one load brings.
  __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 k) {
    const u64 block = first_block(a, row, k);
    bytes = load_16_bytes(static_cast<const unsigned char*>(a.scale) + block * BYTES);
    its_absmax = NESTED ? load_float(a.absmax + (block >> 8)) : 0.0f;
  }
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
  __device__ __forceinline__ void next_unit() {}
  __device__ __forceinline__ u32 bits(int s) const { return each_bits[s]; }
  __device__ __forceinline__ float absmax(int s) const { return each_absmax[NESTED ? s : 0]; }
};

template <bool Vector> struct ScalesOf {
  typedef SingleScales Raw;
};
template <> struct ScalesOf<true> {
  typedef VectorScales Raw;
};
typedef ScalesOf<Config::vector>::Raw RawScales;

// Prefetches the scales that CTA number `cta` of `multiply` loads first to L2. Each is in a line of its own, and there
// are too many to arrive in time.
__device__ __forceinline__ void prefetch_scales(const Arguments& a, u32 cta, u32 thread) {
  const u32 first = first_unit(a, cta);
  if (Config::grouped && first == end_unit(a, cta)) return;
  const WorkUnit at(a, first);
  for (u32 row = at.row_tile * TILE_ROWS + thread; row < (at.row_tile + 1) * TILE_ROWS; row += 128) {
    const u64 block = first_block(a, row_of(a, at, row), at.depth * UNIT_K);
    const void* from = static_cast<const unsigned char*>(a.scale) + block * BYTES;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
  }
}
