// Halves of blocks, keys and values in turn, that are on their way to shared memory: of large heads, registers hold the
// sums and one half. They lie where sums meet once all blocks are multiplied.
//
// A lane copies the pieces of 16 bytes that it will read itself, and all lanes' pieces of one number lie side by side:
// so no lane waits for another, and they meet in no bank.

#include "block.cuh"
#include "shared.cuh"

class Waiting {
 public:
  __device__ __forceinline__ Waiting(u32 warp, u32 lane) : own(BEHIND_NEW + warp * HALVES * HALF_BYTES + lane * 16) {}
  __device__ static u32 behind(u32 slot) { return slot + 1 == HALVES ? 0 : slot + 1; }
  // Asks for the keys or the values of the block whose turn it is. They all count, whether there is one or not.
  template <class Half>
  __device__ __forceinline__ void ask(const Text& text, u32 turn, u32 slot, u32 group, u32 member) const {
    const u32 to = u32(__cvta_generic_to_shared(memory)) + own + slot * HALF_BYTES;
    Half::for_each(text, text.token_at(turn), 0, group, member, [&](u32 i, u32 j, const u16* from, bool there) {
      copy_async_cached(to + (i * Half::PARTS + j) * PIECES, from, there);
    });
    close_group();
  }
  // The half that was asked for first of those that are on their way.
  template <class Half> __device__ __forceinline__ void take(Half& half, u32 slot) const {
    wait_for_groups<WAITS ? int(HALVES) - 1 : 0>();
#pragma unroll
    for (u32 piece = 0; piece < HALF_BYTES / PIECES; piece++)
      half.of[piece / Half::PARTS][piece % Half::PARTS] =
          *reinterpret_cast<const uint4*>(memory + own + slot * HALF_BYTES + piece * PIECES);
  }
  // Until none is on its way, and no warp of the CTA reads one.
  __device__ __forceinline__ void close() const {
    wait_for_groups<0>();
    __syncthreads();
  }

 private:
  static constexpr u32 PIECES = 32 * 16;  // bytes of all lanes' pieces of one number
  u32 own;                                // where this lane's first one goes
};
