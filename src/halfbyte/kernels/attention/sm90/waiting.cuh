// Halves of blocks, keys and values in turn, that are on their way to shared memory: of large heads, registers hold the
// sums and one half. They lie where sums meet once all blocks are multiplied.
//
// An instruction of a warp copies the row of a token, so that memory gives whole lines. In shared memory the pieces of
// 16 bytes of a row change places: eight lanes that read their pieces at once, four of two tokens' keys, or two of four
// tokens' values, meet in no bank.

#include "block.cuh"
#include "shared.cuh"

class Waiting {
 public:
  __device__ __forceinline__ Waiting(u32 warp, u32 lane) : own(BEHIND_NEW + warp * HALVES * HALF_BYTES), lane(lane) {}
  __device__ static u32 behind(u32 slot) { return slot + 1 == HALVES ? 0 : slot + 1; }
  // Asks for the keys or the values of the block whose turn it is, when all lanes have taken what was in the slot. It
  // counts, whether there is such a block or not.
  template <class Half> __device__ __forceinline__ void ask(const Text& text, u32 turn, u32 slot) const {
    const u32 base = text.token_at(turn), to = u32(__cvta_generic_to_shared(memory)) + own + slot * HALF_BYTES;
    const u16* from = Half::rows(text) + text.place(base, 0) + 8 * lane;
    __syncwarp();
#pragma unroll
    for (u32 token = 0; token < BLOCK; token++)
      copy_row_async(to + place(token, lane), from + token * SIZE, text.is_in_cache(base + token));
    close_group();
  }
  // The half that was asked for first of those that are on their way.
  template <class Half> __device__ __forceinline__ void take(Half& half, u32 slot) const {
    wait_for_groups<WAITS ? int(HALVES) - 1 : 0>();
    __syncwarp();
    const u32 group = lane / 4, member = lane % 4;
#pragma unroll
    for (u32 i = 0; i < Half::TOKENS; i++)
#pragma unroll
      for (u32 j = 0; j < Half::PARTS; j++)
        half.of[i][j] = *reinterpret_cast<const uint4*>(
            memory + own + slot * HALF_BYTES + place(Half::token(i, group, member), Half::piece(j, group, member)));
  }
  // Until none is on its way, and no warp of the CTA reads one.
  __device__ __forceinline__ void close() const {
    wait_for_groups<0>();
    __syncthreads();
  }

 private:
  // Of keys, tokens 2 n and 2 n + 1 differ in bit 2 of a place; of values, tokens 2 n to 2 n + 6 in bits 1 and 2.
  __device__ static u32 place(u32 token, u32 piece) {
    const u32 turn = (token & 6) ^ (token & 1) * 4;
    return token * SIZE * 2 + (piece % 8 ^ turn) * 16 + piece / 8 * 128;
  }
  u32 own, lane;  // where the warp's halves are
};
