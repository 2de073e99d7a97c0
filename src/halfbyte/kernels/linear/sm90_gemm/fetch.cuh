// The producer warpgroup of kernel.cu. Its warps work side by side: two decode scales, one copies W, one copies x.

#include "work.cuh"

// Below Arguments, which it reads.
#include "device/scale_rows.cuh"

constexpr u32 SCALE_THREADS = 64;
constexpr int SHARE = TILE_N / SCALE_THREADS;  // rows of W a thread

// Decodes the scales of each unit, and clears what the launch before has left in the workspace.
__device__ __forceinline__ void fetch_scales(const Arguments& a, u32 first, u32 last, u32 thread) {
  const auto row_at = [&](const WorkUnit& at, u32 row) { return row_of(a, at, first_row(at) + row); };
  WorkUnit at(a, first);
  RawScales now[SHARE], then[SHARE];  // of this unit and of those after it
#pragma unroll
  for (int i = 0; i < SHARE; i++) now[i].load(a, row_at(at, thread + SCALE_THREADS * i), at.depth * UNIT_K);
  float offset = 0;
  if constexpr (NESTED) {
    offset = load_float(a.offset);
    for (u32 i = thread; i < 256; i += SCALE_THREADS) store_float(shared() + CODE + 4 * i, load_float(a.code + i));
    asm volatile("bar.sync 1, %0;" ::"n"(SCALE_THREADS) : "memory");
  }
  if constexpr (Config::vector)
    for (u32 i = 0; i < at.depth % LOADED; i++)
#pragma unroll
      for (int j = 0; j < SHARE; j++) now[j].next_unit();
  wait_for_prior_kernel();  // the launch before last may still read what it left behind
  u32 stale = (blockIdx.x * Config::cluster + own_rank()) * SCALE_THREADS + thread;
  const auto clear_some = [&] {
    const float none = __uint_as_float(SENTINEL);
    a.stale[stale] = make_float4(none, none, none, none);
    stale += gridDim.x * Config::cluster * SCALE_THREADS;
  };
  Ring ring(1);
  bool has_next = false;
  for (u32 unit = first; unit < last; unit++, ring.next(Config::w_stages)) {
    // The scales to load next are those of later units of this tile, or of the next tile.
    const u32 covered = min(LOADED - at.depth % LOADED, a.depth_units - at.depth);
    if (!has_next && unit + covered < last) {
      WorkUnit after = at;
      after.depth += covered - 1, after.next(a);
#pragma unroll
      for (int i = 0; i < SHARE; i++) then[i].load(a, row_at(after, thread + SCALE_THREADS * i), after.depth * UNIT_K);
      has_next = true;
    }
    wait(shared() + W_EMPTY + 8 * ring.at, ring.parity);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const u32 to = shared() + SCALE + ring.at * SCALE_BYTES + (thread + SCALE_THREADS * i) * 4;
#pragma unroll
      for (int s = 0; s < UNIT_SCALES; s++) {
        const u32 bits = now[i].bits(s);
        const float value =
            NESTED ? decode_nested(::load_float(shared() + CODE + (bits & 255) * 4), now[i].absmax(s), offset)
                   : decode_flat(bits);
        store_float(to + s * TILE_N * 4, value);
      }
    }
    arrive(shared() + W_FULL + 8 * ring.at);
    if (stale < a.stale_count) clear_some();
    at.next(a);
    if (covered == 1) {
#pragma unroll
      for (int i = 0; i < SHARE; i++) now[i] = then[i];
      has_next = false;
    } else {
#pragma unroll
      for (int i = 0; i < SHARE; i++) now[i].next_unit();
    }
  }
  while (stale < a.stale_count) clear_some();
}

// The tensor map of experts has W as {bytes of a row, rows, experts}, or {bytes, halves, rows, experts}.
__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const StreamUnit& at, u32 full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(byte), "r"(first_row(at)), "r"(full)
      : "memory");
}
__device__ __forceinline__ void copy_w(u32 to, u64 map, u32 byte, const GroupedUnit& at, u32 full) {
  if constexpr (HALVES)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(map), "r"(byte), "r"(0), "r"(first_row(at) / 2), "r"(at.tile.expert), "r"(full)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(map), "r"(byte), "r"(first_row(at)), "r"(at.tile.expert), "r"(full)
        : "memory");
}

// One thread: W of each unit.
__device__ __forceinline__ void fetch_w(const Arguments& a, u64 map, u32 first, u32 last) {
  WorkUnit at(a, first);
  Ring ring(1);
  for (u32 unit = first; unit < last; unit++, ring.next(Config::w_stages), at.next(a)) {
    const u32 full = shared() + W_FULL + 8 * ring.at;
    wait(shared() + W_EMPTY + 8 * ring.at, ring.parity);
    expect(full, W_BYTES);
    copy_w(shared() + W_AT + ring.at * W_BYTES, map, at.depth * (UNIT_K / 2), at, full);
  }
}

// Of x, in a step.
__device__ __forceinline__ u32 step_bytes(const StreamUnit&) { return X_STEP; }
__device__ __forceinline__ u32 step_bytes(const GroupedUnit& at) { return copied_rows(at.tile) * (STEP_K * 2); }

// One thread: x of each unit, step by step.
__device__ __forceinline__ void fetch_x(const Arguments& a, u32 first, u32 last) {
  wait_for_prior_kernel();  // until x is laid out
  WorkUnit at(a, first);
  Ring ring(1);
  for (u32 unit = first; unit < last; unit++, at.next(a)) {
    const uint4* from = a.laid_out + u64(at.column_tile * a.depth_units + at.depth) * (X_BYTES / 16);
    for (u32 step = 0; step < UNIT_K / STEP_K; step++, ring.next(Config::x_stages)) {
      const u32 full = shared() + X_FULL + 8 * ring.at;
      wait(shared() + X_EMPTY + 8 * ring.at, ring.parity);
      const u32 bytes = step_bytes(at);
      expect(full, bytes);
      // Each CTA of a cluster brings a part of x to all.
      const u32 size = bytes / Config::cluster, to = shared() + X_AT + ring.at * X_STEP + own_rank() * size;
      const uint4* part = from + (step * X_STEP + own_rank() * size) / 16;
      if constexpr (Config::cluster == 1) copy(to, part, size, full);
      else copy_to_all(to, part, size, full, (1 << Config::cluster) - 1);
    }
  }
}

__device__ __forceinline__ void fetch(const Arguments& a, u64 map, u32 first, u32 last, u32 warp, u32 lane) {
  if (warp == 0 && lane == 0) {
    for (u32 stage = 0; stage < Config::w_stages; stage++) {
      init(shared() + W_FULL + 8 * stage, SCALE_THREADS + 1);  // every thread's scales, and the copied bytes
      init(shared() + W_EMPTY + 8 * stage, WARPS);
    }
    for (u32 stage = 0; stage < Config::x_stages; stage++) {
      init(shared() + X_FULL + 8 * stage, 1);
      init(shared() + X_EMPTY + 8 * stage, WARPS * Config::cluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  if constexpr (Config::cluster > 1) sync_cluster();  // before another CTA's copies and arrivals reach the barriers
  sync_all();
  if (warp < SCALE_THREADS / 32) fetch_scales(a, first, last, warp * 32 + lane);
  else if (warp == 2 && lane == 0) fetch_w(a, map, first, last);
  else if (warp == 3 && lane == 0) fetch_x(a, first, last);
}
