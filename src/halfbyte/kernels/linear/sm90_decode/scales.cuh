// How kernel.cu decodes scales: a warp decodes those of its blocks of a tile once, a few in each lane, and its lanes
// share them through shared memory. The absmax of nested scales come with the tile.

#include "walk.cuh"

// The bits of a scale as stored.
__device__ __forceinline__ u32 load_bits(u32 address) {
  if constexpr (SCALE_SIZE == 4) return load_number(address);
  return SCALE_SIZE == 1 ? load_byte(address) : load_short(address);
}

// The producer copies the absmax of a tile's nested scales: a row's part of K has two at most, and a lane copies one.
// L2 takes long to answer; a multiplying thread would have to load them a tile earlier, and has no registers for that.
__device__ __forceinline__ const float* absmax_of(const Arguments& a, const Tile& tile, u32 first_block, u32 lane) {
  const u32 row_blocks = a.k / 64, row = min(tile.row + lane / 2, a.n[tile.part] - 1);
  const u32 first = row * row_blocks + first_block, last = row * row_blocks + min(first_block + BLOCKS, row_blocks) - 1;
  return a.weight[tile.part].absmax +
         min(first / Config::scale_blocks / 256 + lane % 2, last / Config::scale_blocks / 256);
}
__device__ __forceinline__ void copy_absmax(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// A lane's part in decoding its warp's scales of a tile: it decodes EACH of them, of one row, and reads those of two
// rows for every block. No other warp reads or writes them.
struct ScaleDecoder {
  u32 row, block, from, to;  // block: its first, as `place` counts. from, to: addresses in shared memory

  __device__ __forceinline__ ScaleDecoder(u32 shared, u32 warp, u32 lane)
      : row(lane / 2), block(place(warp, lane % 2 * (Config::slice / 2))) {
    const u32 byte = block / Config::scale_blocks * SCALE_SIZE;
    from = shared + SCALES;
    if constexpr (!TENSOR_SCALES) {
      from += byte;
    } else {
      from += byte / Config::scale_chunk * (TILE_N * Config::scale_chunk) +
              (row_at<Config::scale_chunk>(row) ^ byte % Config::scale_chunk);
    }
    to = shared + DECODED + warp * DECODED_WARP;
  }

  __device__ __forceinline__ void decode(const Arguments& a, u32 shared, const Tile& tile, u32 first_block, u32 slot,
                                         float offset, u32 lane) const {
    const u32 row_blocks = a.k / 64;
    const u32 begin = ((tile.row + row) * row_blocks + first_block) /
                      Config::scale_blocks;  // the number of the row's first scale in this CTA
    u32 at = from;
    if (FEW_REGISTERS) at = kept(at);  // so that addresses are computed anew for every tile
    at += slot * SCALE_STAGE;
    if (Config::bulk_scales) at += row * (row_blocks / Config::scale_blocks * SCALE_SIZE);
    if (Config::window_scales) at += row * SCALE_ROW + (begin * SCALE_SIZE & 15);
    constexpr bool AT_ONCE = OWN_BYTES == 4 && !EXPONENTS;  // of those, rows may begin at any even byte
    const u32 four = AT_ONCE ? load_number(at) : 0;
    u32 bits[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 before = e * Config::joined / Config::scale_blocks * SCALE_SIZE;
      bits[e] = AT_ONCE ? four >> 8 * before & ~0u >> 32 - 8 * SCALE_SIZE : load_bits(at + before);
    }
    float value[HALVES * EACH], absmax[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (NESTED && (e == 0 || !ONE_ABSMAX)) {
        const u32 second = (begin % 256 + (block + e * Config::joined) / Config::scale_blocks) / 256;
        absmax[e] = load_float(shared + ABSMAX + slot * 128 + row * 8 + second * 4);
      }
#pragma unroll
    for (int i = 0; i < HALVES * EACH; i++) {
      const u32 own = bits[i / HALVES] >> 8 * (i % HALVES);
      value[i] = NESTED ? load_float(shared + code_at(tile.part, own)) : decode_flat(own);
    }
#pragma unroll
    for (int i = 0; i < HALVES * EACH; i++) {
      const u32 e = i / HALVES;
      if (NESTED) value[i] = decode_nested(value[i], absmax[ONE_ABSMAX ? 0 : e], offset);
      if (Config::padded && first_block + block + e * Config::joined >= row_blocks) value[i] = 0;  // beyond K
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HALVES * EACH; i++)
      store_float(to + (lane % 2 * HALVES * EACH + i) * DECODED_PITCH + scale_place(row) * 4, value[i]);
    __syncwarp();
  }

  // Of a lane's two rows, for half a block, or all of it.
  __device__ __forceinline__ float2 of_block(u32 b, u32 half, u32 group) const {
    const uint2 both = load_pair(to + (HALVES * b + half) / Config::joined * DECODED_PITCH + group * 8);
    return make_float2(__uint_as_float(both.x), __uint_as_float(both.y));
  }
};
