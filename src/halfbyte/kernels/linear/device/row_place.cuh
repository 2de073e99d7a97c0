// Where a lane of a warp that multiplies finds its part of a stage of W, for kernels whose stages have 256 of K of a
// tile's rows. The includer has TILE_N (rows of W a tile), TILE_ROWS (of each weight with `paired`), JOINED (spans that
// share a scale), LANE_SPANS and IN_ORDER; its Config has `span`.

#include "ptx.cuh"

// It reads rows `row` (even) and `row` + 1 of 128 bytes, whose 16-byte pieces are swizzled by the row. Either a quad's
// four lanes share each span, and take neighbouring quarters of it; the address of a span is that of the first one,
// exclusive or the span's place in the row. Or, with LANE_SPANS, each lane has one of a unit's four spans, 32 bytes,
// and takes it by eights, one a step: lane l takes number s ^ l in step s, so that rows do not wait for each other's
// banks. The address of a step is that of step 0, exclusive or 8 s. Or, with IN_ORDER, x keeps the order of K: then a
// lane takes its byte of every word, and all four read the same piece. The address of a piece is that of the first one,
// exclusive or its place in the row.
//
// With `paired` it reads row `row` of gate and of up, which lie behind each other in a stage, while their scales are
// neighbours; of a warp's eight rows half of the lanes read every other one. scales: where its own begin, of those of a
// span. own: the byte permute that picks its own bytes of two words.
struct RowPlace {
  u32 row, upper, lower, scales, own;
  __device__ RowPlace(u32 warp, u32 lane) {
    const u32 group = lane / 4, member = lane % 4;
    row = Config::paired ? warp * 8 + group % 4 * 2 + group / 4 : warp * 16 + group * 2;
    if constexpr (LANE_SPANS) upper = row * 128 + (5 * member ^ (row & 7) * 2) * 8;
    else if constexpr (IN_ORDER) upper = row * 128 + (row & 7) * 16;
    else
      upper =
          row * 128 + (Config::span == 64 ? (member / 2 ^ row & 7) * 16 + member % 2 * 8 : (row & 7) * 16 + member * 4);
    lower = Config::paired ? upper + TILE_ROWS * 128 : (upper ^ 16) + 128;
    scales = row * (Config::paired ? 8 : 4) + (LANE_SPANS ? member / JOINED * TILE_N * 4 : 0);
    own = 0x40 + 0x11 * member;
  }
};

// A lane's words of a row's span.
__device__ __forceinline__ void load(u32 (&words)[2], u32 at) {
  const uint2 pair = load_pair(at);
  words[0] = pair.x, words[1] = pair.y;
}
__device__ __forceinline__ void load(u32 (&words)[1], u32 at) { words[0] = load_number(at); }
// With IN_ORDER: its own bytes of the words of pieces from place `first` on.
template <int Words> __device__ __forceinline__ void load_in_order(u32 (&words)[Words], u32 at, u32 first, u32 own) {
#pragma unroll
  for (u32 i = 0; i < Words; i++) {
    const uint4 piece = load_four_words(at ^ first + i * 16);
    words[i] = __byte_perm(__byte_perm(piece.x, piece.y, own), __byte_perm(piece.z, piece.w, own), 0x5410);
  }
}
