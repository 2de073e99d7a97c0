// Where a lane of a warp that multiplies finds its part of a stage of W, for kernels whose stages have 256 of K of a
// tile's rows. The includer has TILE_ROWS (rows of W, or of each weight with `paired`); its Config has `span`.

#include "ptx.cuh"

// It reads rows `row` (even) and `row` + 1 of 128 bytes, whose 16-byte pieces are swizzled by the row; so the address
// of a span is that of the first span, exclusive or the span's place in the row. With `paired` it reads row `row` of
// gate and of up, which lie behind each other in a stage, while their scales are neighbours; of a warp's eight rows
// half of the lanes read every other one. scales: where its own begin, of those of a span.
struct RowPlace {
  u32 row, upper, lower, scales;
  __device__ RowPlace(u32 warp, u32 lane) {
    const u32 group = lane / 4, member = lane % 4;
    row = Config::paired ? warp * 8 + group % 4 * 2 + group / 4 : warp * 16 + group * 2;
    upper =
        row * 128 + (Config::span == 64 ? (member / 2 ^ row & 7) * 16 + member % 2 * 8 : (row & 7) * 16 + member * 4);
    lower = Config::paired ? upper + TILE_ROWS * 128 : (upper ^ 16) + 128;
    scales = row * (Config::paired ? 8 : 4);
  }
};

// A lane's words of a row's span.
__device__ __forceinline__ void load(u32 (&words)[2], u32 at) {
  const uint2 pair = load_pair(at);
  words[0] = pair.x, words[1] = pair.y;
}
__device__ __forceinline__ void load(u32 (&words)[1], u32 at) { words[0] = load_number(at); }
