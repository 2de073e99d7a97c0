// The reducer warps of kernel.cu: they add up what the multiplying warps and the CTAs of a cluster have, and store it.

#include "combine.cuh"
#include "norm.cuh"
#include "walk.cuh"

// Of experts: a tile's results, four rows of W by one pair a lane.
__device__ __forceinline__ void store_pairs(const Arguments& a, u32 shared, const Tile& tile, float4 v, ushort4 bias,
                                            u32 lane) {
  const u32 pair = pair_of(shared, tile.unit, lane / 4), row = tile.own + 4 * (lane % 4);
  const u32 kept = shared + GATE + 16 * lane;  // gate's, where this lane alone reads and writes
  v.x *= a.unit, v.y *= a.unit, v.z *= a.unit, v.w *= a.unit;
  if (Config::bias && a.result[0].bias)
    v.x += unpack(bias.x), v.y += unpack(bias.y), v.z += unpack(bias.z), v.w += unpack(bias.w);
  if (pair == NOBODY) return;
  if constexpr (TOP_K > 0) {
    give(a, pair, row, v);
  } else if constexpr (Config::wide) {
    *reinterpret_cast<float4*>(reinterpret_cast<float*>(a.result[0].y) + u64(pair) * a.expert_rows + row) = v;
  } else if constexpr (PAIRED) {
    if (tile.half == 0) store_sums(kept, v);
    else
      store_four(a.result[0].y + u64(pair) * (a.expert_rows / 2) + row, gated<Config::activation>(load_sums(kept), v));
  } else if constexpr (INTERLEAVED) {
    const u32 word = pack(gated<Config::activation>(v.x, v.y), gated<Config::activation>(v.z, v.w));
    *reinterpret_cast<u32*>(a.result[0].y + u64(pair) * (a.expert_rows / 2) + row / 2) = word;
  } else {
    store_four(a.result[0].y + u64(pair) * a.expert_rows + row, v);
  }
}

__device__ __forceinline__ void reduce(const Arguments& a, u32 shared, u32 part, u32 lane) {
  constexpr int OWN = Config::m_tiles / Config::reducers;  // groups of eight columns
  const u32 rank = blockIdx.y, column = part * (8 * OWN) + lane / 4, four = lane % 4;
  float factor[OWN];  // of a column's sums
#pragma unroll
  for (int c = 0; c < OWN; c++) factor[c] = a.unit;
  const bool squares = reducer_squares(a) && rank == 0;
  for (u32 row = 0; squares && row < a.m; row++) {
    const float found = read_factor(a, row, lane);
    if (column == row) factor[0] *= found;
  }
  bool is_first = true;
  Ring sums(0), slot(0);
  Walk walk(a, shared);
  for (; walk.is_there(); walk.next(), sums.next(Config::sum_buffers), slot.next(SLOTS)) {
    const Tile tile = walk.get();
    const Result& own = a.result[tile.part];
    const u32 row = tile.row + 4 * four, n = a.n[tile.part];
    // What is added comes from far away: it is asked for before there are sums.
    ushort4 added[OWN], bias = make_ushort4(0, 0, 0, 0);
    const bool stores = rank == 0 && (ROUTED || row < n);
    if (Config::bias && own.bias && stores) bias = *reinterpret_cast<const ushort4*>(own.bias + row);
    if constexpr (Config::residual)
#pragma unroll
      for (int c = 0; c < OWN; c++)
        if (const u32 m = first_row() + 8 * c + column; stores && m < a.m)
          added[c] = *reinterpret_cast<const ushort4*>(a.residual + u64(m) * n + row);
    wait(shared + SUM_FULL + 8 * sums.at, sums.parity);
    if (FOLDS_NORM && is_first && rank == 0 && !squares) {  // the warps' sums of squares came with their first sums
      if constexpr (Config::cluster > 1) wait(shared + SQUARES_FULL, 0);
#pragma unroll
      for (int c = 0; c < OWN; c++) factor[c] *= factor_of(a, shared, 8 * c + column);
    }
    is_first = false;
    float4 total[OWN];
#pragma unroll
    for (int c = 0; c < OWN; c++) {
      total[c] = make_float4(0, 0, 0, 0);
      const u32 from = shared + SUM + sums.at * Config::warps * SUM_WARP + sum_at(8 * c + column, four);
      if (first_row() + 8 * c + column < a.m)
#pragma unroll
        for (int w = 0; w < Config::warps; w++) {
          const float4 v = load_sums(from + w * SUM_WARP);
          total[c].x += v.x, total[c].y += v.y, total[c].z += v.z, total[c].w += v.w;
        }
    }
    arrive(shared + SUM_EMPTY + 8 * sums.at);

    if constexpr (Config::cluster > 1) {
      const u32 full = shared + SLOT_FULL + 8 * slot.at, empty = shared + SLOT_EMPTY + 8 * slot.at;
      const u32 place = shared + SLOT + slot.at * (Config::cluster - 1) * SENT + part * (OWN * 512) + 16 * lane;
      if (rank > 0) {
        wait(empty, slot.parity ^ 1);
        const u32 to = address_in(place + (rank - 1) * SENT, 0), barrier = address_in(full, 0);
#pragma unroll
        for (int c = 0; c < OWN; c++)
          if (first_row() + 8 * c + column < a.m) send_sums(to + c * 512, total[c], barrier);
        continue;
      }
      if (part == 0 && lane == 0)
        expect(full,
               min(max(a.m, first_row()) - first_row(), 8 * Config::m_tiles) * TILE_N * 4 * (Config::cluster - 1));
      wait(full, slot.parity);
#pragma unroll
      for (int other = 0; other < Config::cluster - 1; other++)
#pragma unroll
        for (int c = 0; c < OWN; c++)
          if (first_row() + 8 * c + column < a.m) {
            const float4 v = load_sums(place + other * SENT + c * 512);
            total[c].x += v.x, total[c].y += v.y, total[c].z += v.z, total[c].w += v.w;
          }
      __syncwarp();
      // Of the last ones nobody waits for the room, and who has sent its sums may have ended.
      static_assert(SLOTS % 2 == 0, "as the walk counts");
      if (lane > 0 && lane < Config::cluster && walk.is_there_behind(SLOTS)) give_back_at(address_in(empty, lane));
    }

    if constexpr (ROUTED) {
      store_pairs(a, shared, tile, total[0], bias, lane);
      continue;
    }
    const Result& to = a.result[PAIRED ? 0 : tile.part];
    // Gate's, kept where this lane alone reads and writes.
    const u32 kept = shared + GATE + part * (OWN * 512) + 16 * lane;
#pragma unroll
    for (int c = 0; c < OWN; c++) {
      const u32 m = first_row() + 8 * c + column;
      if (m < a.m && row < n) {
        total[c].x *= factor[c], total[c].y *= factor[c], total[c].z *= factor[c], total[c].w *= factor[c];
        if (Config::bias && own.bias) {
          total[c].x += unpack(bias.x), total[c].y += unpack(bias.y);
          total[c].z += unpack(bias.z), total[c].w += unpack(bias.w);
        }
        if constexpr (PAIRED) {
          if (tile.half == 0) {
            store_sums(kept + c * 512, total[c]);
            continue;
          }
          total[c] = gated<Config::activation>(load_sums(kept + c * 512), total[c]);
        }
        if constexpr (Config::residual) {
          const ushort4 r = added[c];
          total[c].x = fmaf(a.result_scale, total[c].x, unpack(r.x));
          total[c].y = fmaf(a.result_scale, total[c].y, unpack(r.y));
          total[c].z = fmaf(a.result_scale, total[c].z, unpack(r.z));
          total[c].w = fmaf(a.result_scale, total[c].w, unpack(r.w));
        }
        store_four(to.y + u64(m) * n + row, total[c]);
      }
    }
  }
  if constexpr (TOP_K > 0)
    if (rank == 0) combine(a, lane);
}
