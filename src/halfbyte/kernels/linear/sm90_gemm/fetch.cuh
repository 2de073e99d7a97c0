// The producer warpgroup of kernel.cu. Its warps work side by side: two decode scales, one copies W, one copies x.

#include "back.cuh"

// Below Arguments, which they read.
#include "device/copy_w.cuh"
#include "device/scale_rows.cuh"

constexpr u32 SCALE_THREADS = 64;
constexpr int SHARE = TILE_N / SCALE_THREADS;  // rows of W a thread

// The weight whose scales a thread decodes: with `paired` those of up are the other of two neighbours'.
__device__ __forceinline__ bool is_of_up(u32 thread) { return Config::paired && thread % 2; }

// Brings the codes of nested scales, by so many threads, and returns what is added to each.
template <u32 By> __device__ __forceinline__ float prepare_code(const Arguments& a, const Arguments& up, u32 thread) {
  if constexpr (!NESTED) return 0;
  const float offset = load_float((is_of_up(thread) ? up : a).offset);
  for (u32 i = thread; i < 256; i += By) {
    store_float(shared() + CODE + 4 * i, load_float(a.code + i));
    if constexpr (Config::paired) store_float(shared() + CODE + 1024 + 4 * i, load_float(up.code + i));
  }
  meet<1, By>();
  return offset;
}
// code: the address of the weight's. Weights that are computed are multiplied by a pair of the type of x.
__device__ __forceinline__ float decoded(u32 bits, float absmax, u32 code, float offset) {
  const float scale = NESTED ? decode_nested(::load_float(code + (bits & 255) * 4), absmax, offset) : decode_flat(bits);
  return COMPUTES ? __uint_as_float(pack(scale, scale)) : scale;
}

// Clears what the launch before has left in the workspace, by so many threads, a number of four each at a time.
template <u32 By> class Clearing {
 public:
  __device__ __forceinline__ explicit Clearing(u32 thread)
      : at((blockIdx.x * CLUSTER_CTAS + own_rank()) * By + thread) {}
  __device__ __forceinline__ void step(const Arguments& a) {
    if (at < count_stale(a)) clear(a);
  }
  __device__ __forceinline__ void finish(const Arguments& a) {
    while (at < count_stale(a)) clear(a);
  }

 private:
  u32 at;

  __device__ __forceinline__ void clear(const Arguments& a) {
    const float none = __uint_as_float(SENTINEL);
    a.stale[at] = make_float4(none, none, none, none);
    at += gridDim.x * CLUSTER_CTAS * By;
  }
};

// Decodes the scales of each unit, and clears the workspace.
__device__ __forceinline__ void fetch_scales(const Arguments& a, const Arguments& up, u32 first, u32 last, u32 thread) {
  const Arguments& own = is_of_up(thread) ? up : a;
  const u32 code = shared() + CODE + 1024 * is_of_up(thread);
  const auto row_at = [&](const WorkUnit& at, u32 row) {
    return row_of(a, at, first_row(at) + row / (1 + Config::paired));
  };
  WorkUnit at(a, first);
  RawScales now[SHARE], then[SHARE];  // of this unit and of those after it
#pragma unroll
  for (int i = 0; i < SHARE; i++) now[i].load(own, row_at(at, thread + SCALE_THREADS * i), at.depth * UNIT_K);
  const float offset = prepare_code<SCALE_THREADS>(a, up, thread);
#pragma unroll
  for (int i = 0; i < SHARE; i++) now[i].settle();
  for (u32 unit = 0; unit < at.depth % LOADED; unit++)
#pragma unroll
    for (int i = 0; i < SHARE; i++) now[i].next_unit();
  wait_for_prior_kernel();  // the launch before last may still read what it left behind
  Clearing<SCALE_THREADS> clearing(thread);
  Ring ring(1);
  bool has_next = false;
  for (u32 unit = first; unit < last; unit++, ring.next(Config::w_stages)) {
    // The scales to load next are those of later units of this tile, or of the next tile.
    const u32 covered = min(LOADED - at.depth % LOADED, a.depth_units - at.depth);
    if (!has_next && unit + covered < last) {
      WorkUnit after = at;
      after.depth += covered - 1, after.next(a);
#pragma unroll
      for (int i = 0; i < SHARE; i++)
        then[i].load(own, row_at(after, thread + SCALE_THREADS * i), after.depth * UNIT_K);
      has_next = true;
    }
    wait(shared() + W_EMPTY + 8 * ring.at, ring.parity);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const u32 to = shared() + SCALE + ring.at * SCALE_BYTES + (thread + SCALE_THREADS * i) * 4;
#pragma unroll
      for (int s = 0; s < UNIT_SCALES; s++) {
        store_float(to + s * TILE_N * 4, decoded(now[i].bits(s), now[i].absmax(s), code, offset));
      }
    }
    arrive(shared() + W_FULL + 8 * ring.at);
    clearing.step(a);
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
  clearing.finish(a);
}

// Of 64 rows of W, number i of a stage, the first one in its unit: mates have every other.
__device__ __forceinline__ u32 first_of_turn(u32 i) {
  static_assert(SCALE_THREADS == 64 && (Config::mates == 1 || TURN_K == 64), "rows of a turn");
  return (i * Config::mates + (Config::mates > 1 ? own_rank() : 0)) * 64;
}
// The same on the way back: every row of W of a unit has scales for the CTA's columns.
__device__ __forceinline__ void fetch_column_scales(const Arguments& a, u32 first, u32 last, u32 thread) {
  constexpr int ROWS = STAGE_ROWS / SCALE_THREADS;              // a thread
  constexpr bool AHEAD = SPANS_OF_ROW * (NESTED ? 2 : 1) <= 4;  // there are registers for the next unit's
  WorkUnit at(a, first);
  ColumnScales now[ROWS], then[ROWS];  // of this unit and of the next
  const auto load = [&](ColumnScales(&to)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      to[i].load(a, first_of(a, at), at.depth * UNIT_K + first_of_turn(i) + thread, first_row(at));
  };
  load(now);
  const float offset = prepare_code<SCALE_THREADS>(a, a, thread);
  wait_for_prior_kernel();  // as above
  Clearing<SCALE_THREADS> clearing(thread);
  Ring ring(1);
  for (u32 unit = first; unit < last; unit++, ring.next(Config::w_stages)) {
    at.next(a);
    if (AHEAD && unit + 1 < last) load(then);
    wait(shared() + W_EMPTY + 8 * ring.at, ring.parity);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const u32 to = shared() + SCALE + ring.at * SCALE_BYTES + scale_place(thread + SCALE_THREADS * i) * SCALE_ITEM;
#pragma unroll
      for (int s = 0; s < SPANS_OF_ROW; s++) {
        const float scale = decoded(now[i].bits[s], now[i].absmax[NESTED ? s : 0], shared() + CODE, offset);
        if constexpr (COMPUTES) store_short(to + s * STAGE_ROWS * SCALE_ITEM, __float_as_uint(scale));
        else store_float(to + s * STAGE_ROWS * SCALE_ITEM, scale);
      }
    }
    arrive(shared() + W_FULL + 8 * ring.at);
    clearing.step(a);
    if (!AHEAD && unit + 1 < last) load(now);
#pragma unroll
    for (int i = 0; AHEAD && i < ROWS; i++) now[i] = then[i];
  }
  clearing.finish(a);
}

// One thread: W of each unit.
__device__ __forceinline__ void fetch_w(const Arguments& a, const Arguments& up, u32 first, u32 last) {
  WorkUnit at(a, first);
  Ring ring(1);
  for (u32 unit = first; unit < last; unit++, ring.next(Config::w_stages), at.next(a)) {
    const u32 full = shared() + W_FULL + 8 * ring.at;
    wait(shared() + W_EMPTY + 8 * ring.at, ring.parity);
    expect(full, W_BYTES);
    const u32 to = shared() + W_AT + ring.at * W_BYTES, byte = at.depth * (UNIT_K / 2);
    if constexpr (Config::mates > 1) {
      for (u32 i = 0; i < STAGE_ROWS / TURN_K; i++)
        copy_box(to + i * TURN_K * ROW_BYTES, map_of(a), first_row(at) / 2, at.depth * UNIT_K + first_of_turn(i), full);
      continue;
    }
    copy_w(to, map_of(a), byte, at, full);
    if constexpr (Config::paired) copy_w(to + W_BYTES / 2, map_of(up), byte, at, full);
  }
}

// Of x, in a step; a tile of experts may have fewer rows.
__device__ __forceinline__ u32 step_bytes(const StreamUnit&) { return X_STEP; }
__device__ __forceinline__ u32 step_bytes(const GroupedUnit& at) {
  return Config::copies_x ? X_STEP : copied_rows(at.tile) * (STEP_K * 2);
}

constexpr u32 TWINS = (1 << Config::twins) - 1;  // a bit for each

// A step of a unit of x.
__device__ __forceinline__ void copy_step(const Arguments& a, const WorkUnit& at, u32 step, u32 to, u32 full) {
  const u32 bytes = step_bytes(at), byte = (at.depth * UNIT_K + step * STEP_K) * 2;
  expect(full, bytes);
  if constexpr (Config::copies_x) {
    for (u32 row = 0; row < Config::tile_m; row += X_BOX)
      copy_box(to + row * STEP_K * 2, map_of_x(a), byte, first_x_row(at) + row, full);
  } else {
    const uint4* from = a.laid_out + u64(at.column_tile * a.depth_units + at.depth) * (X_BYTES / 16);
    copy(to, from + step * X_STEP / 16, bytes, full);
  }
}

// One thread: x of each unit, step by step. Of twins each brings its half to both, once both have given the stage back.
__device__ __forceinline__ void fetch_x(const Arguments& a, u32 first, u32 last) {
  wait_for_prior_kernel();  // until x is laid out, or there
  if constexpr (Config::grouped) launch_dependents();
  WorkUnit at(a, first);
  Ring ring(1);
  for (u32 unit = first; unit < last; unit++, at.next(a)) {
    const uint4* from = a.laid_out + u64(at.column_tile * a.depth_units + at.depth) * (X_BYTES / 16);
    for (u32 step = 0; step < UNIT_K / STEP_K; step++, ring.next(Config::x_stages)) {
      const u32 full = shared() + X_FULL + 8 * ring.at;
      wait(shared() + X_EMPTY + 8 * ring.at, ring.parity);
      const u32 bytes = step_bytes(at), to = shared() + X_AT + ring.at * X_STEP;
      expect(full, bytes);
      const u32 byte = (at.depth * UNIT_K + step * STEP_K) * 2;
      if constexpr (Config::twins > 1) {
        const u32 row = own_rank() * X_BOX, begin = row * STEP_K * 2;
        if constexpr (Config::copies_x)
          copy_box_to_all(TWINS, to + begin, map_of_x(a), byte, first_x_row(at) + row, full);
        else copy_to_all(TWINS, to + begin, from + (step * X_STEP + begin) / 16, X_STEP / Config::twins, full);
      } else if constexpr (Config::copies_x) {
        for (u32 row = 0; row < Config::tile_m; row += X_BOX)
          copy_box(to + row * STEP_K * 2, map_of_x(a), byte, first_x_row(at) + row, full);
      } else {
        copy(to, from + step * X_STEP / 16, bytes, full);
      }
    }
  }
}

__device__ __forceinline__ void fetch(const Arguments& a, const Arguments& up, u32 first, u32 last, u32 warp,
                                      u32 lane) {
  if (warp == 0 && lane == 0) {
    for (u32 stage = 0; stage < Config::w_stages; stage++) {
      init(shared() + W_FULL + 8 * stage, SCALE_THREADS + 1);  // every thread's scales, and the copied bytes
      init(shared() + W_EMPTY + 8 * stage, WARPS);
    }
    for (u32 stage = 0; stage < Config::x_stages; stage++) {
      init(shared() + X_FULL + 8 * stage, 1);
      init(shared() + X_EMPTY + 8 * stage, WARPS * Config::twins);
    }
    for (u32 buffer = 0; Config::mates > 1 && buffer < Config::warpgroups * TURNS; buffer++) {
      init(shared() + OPERANDS_FULL + 8 * buffer, 4);  // the warps of a warpgroup, and those of the mate's
      init(shared() + OPERANDS_EMPTY + 8 * buffer, 4 * Config::mates);
    }
    publish_barriers();
  }
  __syncwarp();
  if constexpr (IN_PAIRS) arrive_cluster();
  sync_all();
  // The kernel before may be the one that writes W; not so that of experts, which is another product of theirs.
  if constexpr (Config::copies_x && !Config::grouped) wait_for_prior_kernel();
  if (warp < SCALE_THREADS / 32) {
    if constexpr (Config::back) fetch_column_scales(a, first, last, warp * 32 + lane);
    else fetch_scales(a, up, first, last, warp * 32 + lane);
  } else if (warp == 2 && lane == 0) {
    fetch_w(a, up, first, last);
  } else if (warp == 3 && lane == 0) {
    fetch_x(a, first, last);
  }
}
