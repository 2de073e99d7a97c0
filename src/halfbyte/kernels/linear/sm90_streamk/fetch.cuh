// How kernel.cu comes by W and x: one warpgroup asks for bytes, stages ahead of those that multiply, and decodes scales.

#include "work.cuh"

// A thread carries the scales of its rows of W through registers, ahead of their use: it must not wait for memory.
// With VECTOR it loads 16 bytes a row, good for LOADED units; else one scale at a time.
constexpr int SHARE = (ROWS + 127) / 128;
constexpr int UNIT_BYTES = VECTOR ? (DEPTH >> LOG_BLOCK) * SCALE_SIZE : SPANS * SCALE_SIZE, LOADED = VECTOR ? 16 / UNIT_BYTES : 1;
static_assert(!VECTOR || UNIT_BYTES == 4 || UNIT_BYTES == 8 || UNIT_BYTES == 16, "units begin at words");

struct RawScales {  // as they lie in memory
#if VECTOR
  uint4 bytes;
  float absmax;
#else
  u32 bits[SPANS];
  float absmax[NESTED ? SPANS : 1];
#endif
};

// Loads that stay where they are written: ahead of the bytes of W, behind which they would queue for microseconds.
__device__ __forceinline__ float load_float(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}
__device__ __forceinline__ uint4 load_16_bytes(const void* from) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
  return value;
}
__device__ __forceinline__ u32 load_bits(const Arguments& a, u64 block) {
  return __ldg(static_cast<const ScaleBits*>(a.scale) + block);
}

// The first of the scales that lie beside each other from `k` on, of a row that exists, for what VECTOR loads at once.
__device__ __forceinline__ u64 first_block(const Arguments& a, u32 row, u32 k) {
  return (u64(min(row, a.n - 1)) * a.k + k / (LOADED * DEPTH) * (LOADED * DEPTH)) >> LOG_BLOCK;
}

// Scales of row `row` from `k` on, which VECTOR rounds down to what is loaded at once.
__device__ __forceinline__ RawScales load_scales(const Arguments& a, u32 row, u32 k) {
  RawScales raw;
#if VECTOR
  const u64 block = first_block(a, row, k);
  raw.bytes = load_16_bytes(static_cast<const unsigned char*>(a.scale) + block * SCALE_SIZE);
  raw.absmax = NESTED ? load_float(a.absmax + (block >> 8)) : 0.0f;
#else
#pragma unroll
  for (int s = 0; s < SPANS; s++) {
    const bool exists = row < a.n && k + s * SPAN < a.k;
    const u64 block = exists ? (u64(row) * a.k + k + s * SPAN) >> LOG_BLOCK : 0;
    raw.bits[s] = exists ? load_bits(a, block) : 0;
    if (NESTED) raw.absmax[s] = exists ? __ldg(a.absmax + (block >> 8)) : 0.0f;
  }
#endif
  return raw;
}

#if VECTOR
__device__ __forceinline__ void next_unit(RawScales& raw) {
  raw.bytes = UNIT_BYTES == 4 ? make_uint4(raw.bytes.y, raw.bytes.z, raw.bytes.w, 0) : make_uint4(raw.bytes.z, raw.bytes.w, 0, 0);
}
#endif

__device__ __forceinline__ void store_scales(const RawScales& raw, float offset, u32 to, u32 column) {
#if VECTOR
  const u32 words[4] = {raw.bytes.x, raw.bytes.y, raw.bytes.z, raw.bytes.w};
#endif
#pragma unroll
  for (int s = 0; s < SCALED; s++) {
#if VECTOR
    const int byte = (s * TOGETHER * SPAN >> LOG_BLOCK) * SCALE_SIZE;
    const u32 bits = words[byte / 4] >> byte % 4 * 8;
    const float absmax = raw.absmax;
#else
    const u32 bits = raw.bits[s];
    const float absmax = raw.absmax[NESTED ? s : 0];
#endif
#if SCALE_TYPE == TYPE_NESTED
    const float value = decode_nested(load_code(__byte_perm(bits, column, 0x7604)), absmax, offset);
#else
    const float value = decode_flat(bits);
#endif
    store_word(to + s * ROWS * 4, __float_as_uint(value));
  }
}

// Scales that CTA number `cta` of `multiply` will load first, from memory into L2. Each is in a line of its own, and in all
// they are too many to arrive as soon as they are needed.
__device__ __forceinline__ void prefetch_scales(const Arguments& a, u32 cta, u32 thread) {
  const WorkUnit at(a, first_unit(a, cta));
  for (u32 row = at.row_tile * ROWS + thread; row < (at.row_tile + 1) * ROWS; row += 128) {
    const void* from = static_cast<const unsigned char*>(a.scale) + first_block(a, row, at.depth * DEPTH) * SCALE_SIZE;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
  }
}

__device__ __forceinline__ void fetch_bytes(const Arguments& a, u64 map, const WorkUnit& at, u32 to, u32 full) {
  expect(full, STAGE_BYTES);
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(at.depth * (DEPTH / 2)), "r"(at.row_tile * ROWS), "r"(full) : "memory");
#if !HELD
  wait_for_the_one_ahead();  // until x is arranged
  const uint4* from = a.arranged + u64(at.column_tile * a.depth_units + at.depth) * (X_BYTES / 16);
  copy(to + W_BYTES, from, X_BYTES, full);
#endif
}

__device__ __forceinline__ void fetch(const Arguments& a, u64 map, u32 first, u32 last, u32 thread) {
  const u32 column = column_of(shared(), thread % 32);
  WorkUnit at(a, first);
#if HELD
  // What writes W may still run: until it has ended W may be brought nearer, but not be read.
  prefetch_scales(a, own_number(), thread);
  if (thread == 0)
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];"
                 ::"l"(map), "r"(at.depth * (DEPTH / 2)), "r"(at.row_tile * ROWS) : "memory");
  wait_for_the_one_ahead();
  if (thread == 0) let_the_next_begin();
#endif
  RawScales now[SHARE], then[SHARE];  // of this unit, and of the next ones
#pragma unroll
  for (int i = 0; i < SHARE; i++) now[i] = load_scales(a, at.row_tile * ROWS + thread + 128 * i, at.depth * DEPTH);
#if SCALE_TYPE == TYPE_NESTED
  const float code[2] = {load_float(a.code + thread), load_float(a.code + thread + 128)}, offset = load_float(a.offset);
#else
  const float offset = 0;
#endif
  if (thread == 0) {  // before anybody else needs the barriers: all wait for the first unit
    for (u32 stage = 0; stage < STAGES; stage++) {
      init(shared() + FULL + 8 * stage, 129);  // every fetching thread, and once more with the bytes to come
      init(shared() + EMPTY + 8 * stage, 128 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  if (thread == 0) fetch_bytes(a, map, at, shared() + TILES, shared() + FULL);
  all_are_here();
#if VECTOR
  for (u32 i = 0; i < at.depth % LOADED; i++)
#pragma unroll
    for (int j = 0; j < SHARE; j++) next_unit(now[j]);
#endif
#if SCALE_TYPE == TYPE_NESTED
  for (u32 half = 0; half < 2; half++)  // a warp's own values, a copy for every lane
#pragma unroll
    for (u32 i = thread % 32 / 8; i < 32; i += 4) {
      const float value = __shfl_sync(~0u, half ? code[1] : code[0], i);
      store_four(shared() + (thread / 32 * 32 + i + half * 128) * TABLE_ROW + 128 + thread % 8 * 16, __float_as_uint(value));
    }
  asm volatile("bar.sync 1, 128;" ::: "memory");
#endif
  u32 left = blockIdx.x * 128 + thread;  // what the launch before has left; all that is ahead of `arrange` is done
  const auto clear_some = [&] {
    const float none = __uint_as_float(SENTINEL);
    a.left[left] = make_float4(none, none, none, none);
    left += gridDim.x * 128;
  };
  Ring ring(1);
  bool has_next = false;
  for (u32 unit = first; unit < last; unit++, ring.next(STAGES)) {
    const u32 full = shared() + FULL + 8 * ring.at, to = shared() + TILES + ring.at * STAGE_BYTES;
    // Which scales come next: of the next units along K, or of the next tile.
    const u32 ahead = min(LOADED - at.depth % LOADED, a.depth_units - at.depth);
    if (!has_next && unit + ahead < last) {
      WorkUnit after = at;
      after.depth += ahead - 1, after.next(a);
#pragma unroll
      for (int i = 0; i < SHARE; i++) then[i] = load_scales(a, after.row_tile * ROWS + thread + 128 * i, after.depth * DEPTH);
      has_next = true;
    }
#if HELD
    if (FETCHERS_WAIT && unit == first + units_ahead_of_x(a)) x_is_held();
#endif
    wait(shared() + EMPTY + 8 * ring.at, ring.parity);
    if (thread == 0 && unit > first) fetch_bytes(a, map, at, to, full);
#pragma unroll
    for (int i = 0; i < SHARE; i++)
      if (thread + 128 * i < ROWS)
        store_scales(now[i], offset, shared() + SCALE + ring.at * SCALE_BYTES + (thread + 128 * i) * 4, column);
    arrive(full);
    if (left < a.left_count) clear_some();
    at.next(a);
    if (ahead == 1) {
#pragma unroll
      for (int i = 0; i < SHARE; i++) now[i] = then[i];
      has_next = false;
    } else {
#if VECTOR
#pragma unroll
      for (int i = 0; i < SHARE; i++) next_unit(now[i]);
#endif
    }
  }
#if HELD
  if (FETCHERS_WAIT && last <= first + units_ahead_of_x(a)) x_is_held();
#endif
  while (left < a.left_count) clear_some();
#if CLUSTER > 1
  sync_cluster(), sync_cluster();  // as in cluster_reduce
#endif
}
