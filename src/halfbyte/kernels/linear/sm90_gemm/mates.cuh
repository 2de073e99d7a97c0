// The way back by mates, with Config::mates: two CTAs of a cluster, with one tile of W and neighbouring tiles of x.
//
// back.cuh's lane has many rows of W, each with a scale of its own, so all its look-ups are in shared memory, which is
// what the tensor cores then wait for. Here a thread has half of a row of a turn, 32 columns with one scale, keeps the
// scale's products with the codebook in registers (device/permuted_table.cuh) if weights are not computed, and stores
// weights, which wgmma transposes: rows of 128 bytes in 16-byte pieces that are swizzled by the row, with columns in
// the order of the MMA. Those of a warp are 16, of which lanes have neighbours, so eight even ones come before eight
// odd ones.
//
// That takes longer than the products do, but both mates need the same weights. So each decodes every other turn, for
// itself and for its mate, and of W fetches that half alone. A warp has 16 rows of a turn: it stores them, and copies
// them to the mate as one piece. Should threads store there themselves, the barrier would count every 16 bytes, which
// takes twice as long as all the rest.
//
// A warpgroup has buffers for the operands of a unit's turns. A buffer is full when the four warps that decode it have
// said so: its own by arriving, its mate's by bytes that arrive, for which its own warps wait in their place. It is
// empty when the warps of both have multiplied what was there. A warp waits for its products before it decodes, as the
// mate waits for their buffer.

#include "back.cuh"
#include "device/permuted_table.cuh"

constexpr u32 OPERAND_BYTES = 64 * TURN_K * 2, OF_WARP = OPERAND_BYTES / 4;  // of a turn, a warpgroup's and a warp's
static_assert(Config::mates == 1 || (Config::back && !Config::grouped && !COMPUTES && TURNS == 4), "as below");

class Mates {
 public:
  __device__ __forceinline__ Mates(u32 warp, u32 lane)
      : rank(own_rank()),
        away(address_in(shared(), rank ^ 1) - shared()),
        operands(shared() + warp / 4 * TURNS * OPERAND_BYTES),
        full(shared() + OPERANDS_FULL + warp / 4 * TURNS * 8),
        empty(shared() + OPERANDS_EMPTY + warp / 4 * TURNS * 8),
        column(warp * 16 + lane / 4 * 2),
        own(warp % 4 * 16 + lane / 2),
        piece(warp / 4 * 2 + lane % 2),
        leads(lane == 0) {}
  // The first column of the lane's sums.
  __device__ u32 row() const { return column; }

  // The first of the CTA's turns, ahead of all.
  __device__ __forceinline__ void begin(const float (&codebook)[16]) {
    for (u32 number = rank ^ 1; number < TURNS; number += 2) await(number);
    decode_first(codebook, {rank, 0});
  }
  // Adds the products of a unit to the sums; is_last: of all.
  __device__ __forceinline__ void multiply(float (&total)[SUMS], const float (&codebook)[16], const WorkUnit& at,
                                           bool fresh, bool is_last) {
    turn<0>(total, codebook, at, fresh, is_last);
    turn<1>(total, codebook, at, false, is_last);
    turn<2>(total, codebook, at, false, is_last);
    turn<3>(total, codebook, at, false, is_last);
    parity ^= 1;
  }
  // Until all products are in the sums.
  __device__ __forceinline__ void finish() {
    wait_for_products<0>();
    release(TURNS - 1, 1);
    multiplied = 0;
  }

 private:
  u32 rank, away;                  // away: from a place in shared memory to the mate's
  u32 operands, full, empty;       // the warpgroup's buffers and their barriers
  u32 column, own, piece;          // own, piece: the lane's row of a turn, and which 16 bytes of it
  bool leads;                      // its warp
  u32 parity = 0, multiplied = 0;  // of the unit's barriers; the barrier of x of the turn that is being multiplied
  Ring w = Ring(0), x = Ring(0);

  struct Buffer {
    u32 number, parity;
  };
  // That of the turn so many behind number Number of a unit.
  template <u32 Number> __device__ __forceinline__ Buffer buffer(u32 behind) const {
    return {(Number + behind) % TURNS, parity ^ (Number + behind) / TURNS};
  }

  template <u32 Number>
  __device__ __forceinline__ void turn(float (&total)[SUMS], const float (&codebook)[16], const WorkUnit& at,
                                       bool fresh, bool is_last) {
    const Buffer now = buffer<Number>(0);
    wait(full + 8 * now.number, now.parity);
    wait(shared() + X_FULL + 8 * x.at, x.parity);
    const u32 tiles[TURN_STEPS] = {lower_half(shared() + X_AT + x.at * X_STEP)},
              barrier = shared() + X_EMPTY + 8 * x.at;
    x.next(Config::x_stages);
    fence_registers();
    multiply_columns(total, SharedOperands{operands + now.number * OPERAND_BYTES}, tiles, Number > 0 || !fresh, at);
    wait_for_products<1>();
    if (Number > 0 || multiplied) release((Number + TURNS - 1) % TURNS, (Number + 1) % 2);
    multiplied = barrier;
    decode_next<Number>(codebook, is_last);
  }

  // The turn after the next one, if that is the CTA's.
  template <u32 Number> __device__ __forceinline__ void decode_next(const float (&codebook)[16], bool is_last) {
    if (Number % 2 != rank) return;
    if (Number < 2) decode_second(codebook, buffer<Number>(2));
    else if (!is_last) decode_first(codebook, buffer<Number>(2));
  }

  // Half of a stage of W each.
  __device__ __forceinline__ void decode_first(const float (&codebook)[16], const Buffer& to) {
    wait(shared() + W_FULL + 8 * w.at, w.parity);
    decode(codebook, 0, to);
  }
  __device__ __forceinline__ void decode_second(const float (&codebook)[16], const Buffer& to) {
    decode(codebook, 1, to);
    if (leads) arrive(shared() + W_EMPTY + 8 * w.at);
    w.next(Config::w_stages);
  }
  // The operands of a turn, `half` of the stage, into a buffer of both mates.
  __device__ __forceinline__ void decode(const float (&codebook)[16], u32 half, const Buffer& to) {
    const u32 row = half * TURN_K + own;
    const uint4 words =
        load_four_words(shared() + W_AT + w.at * W_BYTES + row * ROW_BYTES + (piece ^ own / 2 & 3) * 16);
    const float scale =
        load_float(shared() + SCALE + w.at * SCALE_BYTES + (piece * 32 / Config::span * STAGE_ROWS + row) * SCALE_ITEM);
    const PermutedTable table([&](int i) { return scaled(codebook[i], scale); });
    const u32 four[] = {words.x, words.y, words.z, words.w};
    wait(empty + 8 * to.number, to.parity ^ 1);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {  // sixteen columns, a warp's
      u32 even[2][2], odd[2][2];
#pragma unroll
      for (int j = 0; j < 2; j++) table.look_up_apart(four[2 * i + j], even[j], odd[j]);
      store(to.number, piece % 2 * 4 + 2 * i, even), store(to.number, piece % 2 * 4 + 2 * i + 1, odd);
    }
    publish(to.number);
  }
  // What the warp has decoded into a buffer, and tells the warps of both.
  __device__ __forceinline__ void publish(u32 number) const {
    const u32 from = operands + number * OPERAND_BYTES + own * 128, barrier = full + 8 * number;
    publish_writes();
    __syncwarp();
    if (!leads) return;
    arrive(barrier);
    copy_to_other(from + away, from, OF_WARP, barrier + away);
  }
  __device__ __forceinline__ void store(u32 number, u32 place, const u32 (&eight)[2][2]) const {
    const u32 to = operands + number * OPERAND_BYTES + own * 128 + (place ^ own & 7) * 16;
    store_four_words(to, make_uint4(eight[0][0], eight[0][1], eight[1][0], eight[1][1]));
  }

  // Of the turn before: its x, and its operands to whoever decodes the next ones there, who decoded these.
  __device__ __forceinline__ void release(u32 number, u32 decoder) const {
    __syncwarp();
    if (!leads) return;
    arrive(multiplied);
    if (decoder != rank) await(number);
    give_back_at(address_in(empty + 8 * number, decoder));
  }
  // A warp's share of what the mate sends to a buffer.
  __device__ __forceinline__ void await(u32 number) const {
    if (leads) expect(full + 8 * number, OF_WARP);
  }
};
