// The producer warpgroup of kernel.cu: it copies W and x to shared memory, stages ahead of the warps that multiply, and
// decodes scales.

#include "work.cuh"

// Below Arguments, which they read.
#include "device/copy_w.cuh"
#include "device/scale_rows.cuh"

constexpr int SHARE = (TILE_N + 127) / 128;

__device__ __forceinline__ void store_scales(const RawScales& raw, float offset, u32 to, u32 column) {
#pragma unroll
  for (int s = 0; s < UNIT_SCALES; s++) {
    const u32 bits = raw.bits(s);
    const float absmax = raw.absmax(s);
    const float value =
        NESTED ? decode_nested(load_code(__byte_perm(bits, column, 0x7604)), absmax, offset) : decode_flat(bits);
    store_word(to + s * SPAN_SCALES, __float_as_uint(value));
  }
}

// x of a unit, of which a tile of experts has as many rows as are laid out.
__device__ __forceinline__ void fetch_x(const uint4* from, const StreamUnit&, u32 to, u32 full) {
  copy(to, from, X_BYTES, full);
}
__device__ __forceinline__ void fetch_x(const uint4* from, const GroupedUnit& at, u32 to, u32 full) {
  for (u32 step = 0; step < UNIT_K / 64; step++)
    copy(to + step * (Config::tile_m * 128), from + step * (Config::tile_m * 8), copied_rows(at.tile) * 128, full);
}
__device__ __forceinline__ u32 x_bytes(const StreamUnit&) { return Config::resident ? 0 : X_BYTES; }
__device__ __forceinline__ u32 x_bytes(const GroupedUnit& at) { return copied_rows(at.tile) * (UNIT_K * 2); }

// W of a unit, which one tile of x alone reads, or several.
__device__ __forceinline__ void copy_unit(const Arguments& a, u64 map, const StreamUnit& at, u32 to, u32 full) {
  copy_box_as(a.column_tiles == 1 ? leaving_first() : staying(), to, map, at.depth * (UNIT_K / 2), first_row(at), full);
}
__device__ __forceinline__ void copy_unit(const Arguments&, u64 map, const GroupedUnit& at, u32 to, u32 full) {
  copy_w(to, map, at.depth * (UNIT_K / 2), at, full);
}

__device__ __forceinline__ void fetch_bytes(const Arguments& a, const Arguments& up, const WorkUnit& at, u32 to,
                                            u32 full) {
  expect(full, W_BYTES + x_bytes(at));
  copy_unit(a, map_of(a), at, to, full);
  if constexpr (Config::paired) copy_unit(a, map_of(up), at, to + W_BYTES / 2, full);
  if constexpr (Config::resident == 0) {
    wait_for_prior_kernel();  // until x is laid out
    if constexpr (Config::next_tile_m > 0) launch_dependents();
    //: (first) x is laid out
    fetch_x(a.laid_out + u64(at.column_tile * a.depth_units + at.depth) * (X_BYTES / 16), at, to + W_BYTES, full);
  }
}

// up: with `paired`; the other of two neighbouring threads then decodes its scales.
__device__ __forceinline__ void fetch(const Arguments& a, const Arguments& up, u32 first, u32 last, u32 thread) {
  constexpr u32 EACH = Config::paired ? 2 : 1;
  const Arguments& own = Config::paired && thread % 2 ? up : a;
  const u32 column = column_of(shared(), thread % CODE_COPIES);
  WorkUnit at(a, first);
  const auto row_at = [&](const WorkUnit& at, u32 i) {
    return row_of(a, at, first_row(at) + (thread + 128 * i) / EACH);
  };
  if constexpr (Config::resident > 0) {
    // The kernel before may be the one that writes W: until it has ended W may be prefetched, but not read.
    prefetch_scales(a, own_number(a), thread);
    if (thread == 0) prefetch_box(map_of(a), at.depth * (UNIT_K / 2), first_row(at));
    if constexpr (Config::paired) {
      prefetch_scales(up, own_number(a), thread);
      if (thread == 0) prefetch_box(map_of(up), at.depth * (UNIT_K / 2), first_row(at));
    }
    wait_for_prior_kernel();
    if (thread == 0) launch_dependents();
  }
  RawScales now[SHARE], then[SHARE];  // of this unit and of those after it
#pragma unroll
  for (int i = 0; i < SHARE; i++) now[i].load(own, row_at(at, i), at.depth * UNIT_K);
  float code[EACH][2], offset = 0;
  if constexpr (NESTED) {
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      const float* from = (i ? up : a).code;
      code[i][0] = load_float(from + thread), code[i][1] = load_float(from + thread + 128);
    }
    offset = load_float(own.offset);
  }
  if (thread == 0) {  // all wait for the first unit, so nobody needs the barriers earlier
    for (u32 stage = 0; stage < Config::stages; stage++) {
      init(shared() + FULL + 8 * stage, 129);  // every producer thread, and once more for the copied bytes
      init(shared() + EMPTY + 8 * stage, 128 * Config::warpgroups);
    }
    publish_barriers();
  }
  __syncwarp();
  if (thread == 0) fetch_bytes(a, up, at, shared() + TILES, shared() + FULL);
  sync_all();
#pragma unroll
  for (int i = 0; i < SHARE; i++) now[i].settle();
  for (u32 unit = 0; unit < at.depth % LOADED; unit++)
#pragma unroll
    for (int i = 0; i < SHARE; i++) now[i].next_unit();
  if constexpr (NESTED) {
    for (u32 half = 0; half < 2; half++)  // each warp writes its own values, with copies for lanes, of its weight
#pragma unroll
      for (u32 i = thread % 32 / 8; i < 32; i += 4) {
        const u32 to = shared() + (thread / 32 * 32 + i + half * 128) * TABLE_ROW + 128 + thread % 8 * 16;
        const bool writes = thread % 8 < CODE_COPIES / 4;
        const float value = __shfl_sync(~0u, half ? code[0][1] : code[0][0], i);
        if constexpr (Config::paired) {
          const float other = __shfl_sync(~0u, half ? code[EACH - 1][1] : code[EACH - 1][0], i);
          if (writes) store_sums(to, make_float4(value, other, value, other));
        } else if (writes) {
          store_copies(to, __float_as_uint(value));
        }
      }
    meet<1, 128>();
  }
  u32 stale = blockIdx.x * 128 + thread;  // the launch before is done, and `lay_out` with it
  const auto clear_some = [&] {
    const float none = __uint_as_float(SENTINEL);
    a.stale[stale] = make_float4(none, none, none, none);
    stale += gridDim.x * 128;
  };
  Ring ring(1);
  bool has_next = false;
  for (u32 unit = first; unit < last; unit++, ring.next(Config::stages)) {
    const u32 full = shared() + FULL + 8 * ring.at, to = shared() + TILES + ring.at * STAGE_BYTES;
    // The scales to load next are those of later units of this tile, or of the next tile.
    const u32 covered = min(LOADED - at.depth % LOADED, a.depth_units - at.depth);
    if (!has_next && unit + covered < last) {
      WorkUnit after = at;
      after.depth += covered - 1, after.next(a);
#pragma unroll
      for (int i = 0; i < SHARE; i++) then[i].load(own, row_at(after, i), after.depth * UNIT_K);
      has_next = true;
    }
    if (Config::resident > 0 && PRODUCERS_WAIT && unit == first + units_before_x(a)) sync_x();
    wait(shared() + EMPTY + 8 * ring.at, ring.parity);
    if (thread == 0 && unit > first) fetch_bytes(a, up, at, to, full);
#pragma unroll
    for (int i = 0; i < SHARE; i++)
      if (thread + 128 * i < TILE_N)
        store_scales(now[i], offset, shared() + SCALE + ring.at * STAGE_SCALES + scale_place((thread + 128 * i) * 4),
                     column);
    arrive(full);
    if (stale < count_stale(a)) clear_some();
    at.next(a);
    if (covered == 1) {
#pragma unroll
      for (int i = 0; i < SHARE; i++) now[i] = then[i], now[i].settle();
      has_next = false;
    } else {
#pragma unroll
      for (int i = 0; i < SHARE; i++) now[i].next_unit();
    }
  }
  if (Config::resident > 0 && PRODUCERS_WAIT && last <= first + units_before_x(a)) sync_x();
  while (stale < count_stale(a)) clear_some();
  if (Config::cluster > 1) meet_cluster();  // as in cluster_reduce
}
