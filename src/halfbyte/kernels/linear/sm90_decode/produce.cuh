// The producer warp of kernel.cu: it copies tiles of W and their scales to shared memory, stages ahead of the others.

#include "scales.cuh"

// The first chunk along K of a step of a tile.
__device__ __forceinline__ u32 chunk_of(u32 first_block, int step) {
  return (first_block + step * STEP_BLOCKS) * BLOCK_BYTES / Config::chunk;
}

// Bytes of W that a stage is filled with.
__device__ __forceinline__ u32 step_bytes(const Arguments& a) {
  return Config::bulk_weights ? TILE_N * row_bytes(a) : STAGE;
}

// Tensor copies for the tile that begins at `row`: W from its chunk number `chunk` on, scales from byte `byte` on.
__device__ __forceinline__ void copy_weights(u32 to, const Weight& w, u32 row, u32 chunk, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {0, %2, %3}], [%4], %5;" ::"r"(to),
      "l"(w.map), "r"(row), "r"(chunk), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_scales(u32 to, const Weight& w, u32 row, u32 byte, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(w.scale_map), "r"(byte), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void prefetch_weights(const Weight& w, u32 row, u32 chunk) {
  prefetch_box(reinterpret_cast<u64>(w.map), 0, row, chunk);
}

// Prefetches the CTA's first tile to L2 while the kernel before still runs. That kernel may be the one that writes W:
// until it has ended W may be prefetched, but not read.
__device__ __forceinline__ void prefetch_first(const Arguments& a, u32 first_block) {
  const Walk walk(a, 0);
  if (!walk.is_there()) return;
  const Tile tile = walk.get();
#pragma unroll
  for (int step = 0; step < Config::steps; step++)
    prefetch_weights(a.weight[tile.part], tile.row, chunk_of(first_block, step));
}

// Pipeline barriers, table and codes are ready. The producer, which makes the barriers, comes here late, and so do the
// others: waiting for each other at the beginning took 0.5 us.
__device__ __forceinline__ void sync_all() { meet<1, PREPARING + 32>(); }

// The producer warp: it asks for a tile as soon as a stage is empty. At the start all stages are, but it asks for
// first_stages only until the first is there: memory answers in any order, and the rest would delay what is needed
// first.
__device__ __forceinline__ void produce(const Arguments& a, u32 shared, u32 first_block, u32 lane) {
  const u32 row_blocks = a.k / 64;
  const u64 policy = Config::batches > 1 ? staying() : leaving_first();  // who else reads the same tile?
  Ring ring(1), scales(0);
  bool alone = true;
  for (Walk walk(a, shared); walk.is_there(); walk.next(), scales.next(SCALE_STAGES)) {
    const Tile tile = walk.get();
    const Weight& w = a.weight[tile.part];
    const float* absmax = NESTED ? absmax_of(a, tile, first_block, lane) : nullptr;
#pragma unroll
    for (int step = 0; step < Config::steps; step++, ring.next(Config::stages)) {
      const u32 full = shared + FULL + 8 * ring.at, to = shared + SCALES + scales.at * SCALE_STAGE;
      if (alone && (ring.at == Config::first_stages || ring.parity == 0)) {
        __syncwarp();
        sync_all();
        alone = false;
        wait(shared + FULL, 0);
      }
      wait(shared + EMPTY + 8 * ring.at, ring.parity);
      if constexpr (!TENSOR_SCALES) {
        const u32 scale_bytes =
            (min(BLOCKS, row_blocks - first_block) + Config::scale_blocks - 1) / Config::scale_blocks * SCALE_SIZE;
        const u32 rows = min(TILE_N, a.n[tile.part] - tile.row);
        const u64 scale = (u64(tile.row + (Config::window_scales ? lane : 0)) * row_blocks + first_block) /
                          Config::scale_blocks * SCALE_SIZE;
        const u64 from = Config::window_scales ? scale & ~15ull : scale;
        const u32 some = Config::window_scales ? u32((scale + scale_bytes + 15 & ~15ull) - from) : rows * scale_bytes;
        const u32 all = Config::window_scales ? __reduce_add_sync(~0u, lane < rows ? some : 0) : some;
        if (lane == 0) expect(full, step_bytes(a) + (step == 0 ? all : 0));
        __syncwarp();
        if (step == 0 && lane < (Config::window_scales ? rows : 1))
          copy(to + lane * SCALE_ROW, w.scale + from, some, full);
      } else {
        if (lane == 0) expect(full, step_bytes(a) + (step == 0 ? SCALE_STAGE : 0));
        if (lane == 0 && step == 0)
#pragma unroll
          for (int i = 0; i < SCALE_COPIES; i++)
            copy_scales(to + i * TILE_N * Config::scale_chunk, w, tile.row,
                        first_block / Config::scale_blocks * SCALE_SIZE + i * Config::scale_chunk, full);
      }
      if (lane == 0) {
        const u32 stage = shared + TILES + ring.at * STAGE;
        const unsigned char* rows = w.packed + u64(tile.row) * row_bytes(a);
        if constexpr (Config::bulk_weights) copy_as(policy, stage, rows, step_bytes(a), full);
        else copy_weights(stage, w, tile.row, chunk_of(first_block, step), full, policy);
      }
      if constexpr (NESTED) {
        if (step == 0) copy_absmax(shared + ABSMAX + scales.at * 128 + lane * 4, absmax);
        arrive_after_copies(full);
      }
    }
  }
  __syncwarp();
  if (alone) sync_all();
}
