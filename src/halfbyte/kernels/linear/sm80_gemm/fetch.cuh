// What comes from memory: x and packed W by asynchronous copies, scales by loads of the threads that need them.

#include "turns.cuh"

// Of the 32 weights that a thread decodes of a stage, piece i: its row of the tile's W, and its first column.
__device__ __forceinline__ u32 piece_row(u32 i) {
  constexpr u32 IN_ROW = Config::back ? TILE_W / 32 : DEPTH / 32;
  return threadIdx.x / IN_ROW + i * (THREADS / IN_ROW);
}
__device__ __forceinline__ u32 piece_column() {
  constexpr u32 IN_ROW = Config::back ? TILE_W / 32 : DEPTH / 32;
  return threadIdx.x % IN_ROW * 32;
}
// Where a thread's piece i of a unit is in W: its row, of all experts' rows, and column, and whether they exist.
struct Place {
  u32 row, column;
  bool exists;
  __device__ __forceinline__ Place(const Arguments& a, const Walk& at, u32 i) {
    const u32 of_tile = piece_row(i);
    const u32 row_tile = row_tile_of(at);
    column = (Config::back ? row_tile * TILE_W : at.depth * DEPTH) + piece_column();
    row = (Config::back ? at.depth * DEPTH : row_tile * TILE_W) + of_tile;
    exists = row < a.n && column < a.k;
    if constexpr (HALVES) {  // of eight rows of the tile, four of gate and the same of up
      const u32 gate = row_tile * (TILE_W / 2) + of_tile / 8 * 4 + of_tile % 4;
      row = gate + (of_tile & 4 ? a.n / 2 : 0);
      exists = gate < a.n / 2 && column < a.k;
    }
    if constexpr (Config::grouped) row += pairs_of(at).expert * a.n;
  }
};

// The units of a run, one after the other, as this thread copies them: of each its x, and W of the one after it, since
// W is decoded ahead. A stage's copies are sent in four parts, between MMAs. Beyond the ends of W and x, and of the
// run, there are zeros.
class Copies {
 public:
  // start: the address of shared memory. Units `first` to `last`.
  __device__ Copies(const Arguments& a, u32 start, u32 first, u32 last)
      : start_(start),
        sharing_(Config::grouped ? ~0u / max(a.m, 1u) : 0),
        x_left_(last - first),
        w_left_(last - first),
        x_at_(a, first),
        w_at_(a, first) {}

  // W of the next unit, in a group with what was sent before.
  __device__ __forceinline__ void send_w(const Arguments& a) {
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
      const Place place(a, w_at_, i);
      const bool exists = w_left_ > 0 && place.exists;
      const u8* from = a.packed + (exists ? (u64(place.row) * a.k + place.column) / 2 : 0);
      copy_async(start_ + PACKED + w_slot_ * PACKED_BYTES + (i * THREADS + threadIdx.x) * 16, from, exists);
    }
    w_left_ -= w_left_ > 0;
    advance(w_at_, a);
    if (++w_slot_ == Config::stages) w_slot_ = 0;
    close_group();
  }
  // The next unit: where this thread's pieces of x come from.
  __device__ __forceinline__ void begin(const Arguments& a) {
    const u32 row = threadIdx.x / 8, piece = threadIdx.x % 8, first = x_at_.depth * DEPTH + piece * 8;
    from_ = a.aligned + first;
    if constexpr (Config::grouped) pairs_ = pairs_of_rows(x_at_) + row;
    else from_ += u64(first_row_of(x_at_) + row) * a.pitch;
    to_ = start_ + X + x_slot_ * X_BYTES + x_place(row, piece);
    rows_ = x_left_ > 0 && first < a.pitch ? rows_from(a, x_at_, row) : 0;
    x_left_ -= x_left_ > 0;
    advance(x_at_, a);
    if (++x_slot_ == Config::stages) x_slot_ = 0;
  }
  // A quarter of them; with the last one W.
  template <u32 PART> __device__ __forceinline__ void send(const Arguments& a) {
#pragma unroll
    for (u32 i = PART * COUNT / 4; i < (PART + 1) * COUNT / 4; i++) {
      const bool exists = i * STEP < rows_;
      const u32 row = Config::grouped ? row_of(pairs_[i * STEP]) : i * STEP;
      copy_async(to_ + i * (STEP * DEPTH * 2), exists ? from_ + u64(row) * a.pitch : a.aligned, exists);
    }
    if constexpr (PART == 3) send_w(a);
  }

 private:
  static constexpr u32 STEP = THREADS / 8, COUNT = TILE_M / STEP;  // rows between a thread's pieces; pieces

  // The row of x of a pair: its number divided by those that share a row, exactly while their product is below 2^32.
  __device__ __forceinline__ u32 row_of(u32 pair) const { return u32(u64(pair + 1) * sharing_ >> 32); }

  const u32 start_, sharing_;
  u32 x_left_, w_left_, x_slot_ = 0, w_slot_ = 0;
  Walk x_at_, w_at_;
  const u16* from_;
  const u32* pairs_;  // of experts, of this thread's rows of x, STEP apart
  u32 to_, rows_;     // of x, from this thread's first one on
};

// The scales of this thread's pieces of a unit.
struct Scales {
  StoredScale stored[PIECES];
  float absmax[NESTED ? PIECES : 1];

  __device__ __forceinline__ void load(const Arguments& a, const Walk& at) {
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
      const Place place(a, at, i);
      stored[i] = 0;  // of weights that do not exist
      if constexpr (NESTED) absmax[i] = 0;
      if (!place.exists) continue;
      const u32 block = (place.row * (a.k / 32) + place.column / 32) >> a.shift;
      stored[i] = __ldg(a.scale + block);
      if constexpr (NESTED) absmax[i] = __ldg(a.absmax + (block >> 8));
    }
  }
  __device__ __forceinline__ float decode(u32 i, float offset) const {
    return decode_scale(stored[i], absmax[NESTED ? i : 0], memory, offset);
  }
};
