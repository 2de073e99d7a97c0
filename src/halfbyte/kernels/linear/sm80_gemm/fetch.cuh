// What comes from memory: x and packed W by asynchronous copies, scales by loads of the threads that need them.

#include "work.cuh"

// Of the 32 weights that a thread decodes of a stage, piece i: its row of the tile's W, and its first column.
__device__ __forceinline__ u32 piece_row(u32 i) {
  constexpr u32 IN_ROW = Config::back ? TILE_W / 32 : DEPTH / 32;
  return threadIdx.x / IN_ROW + i * (THREADS / IN_ROW);
}
__device__ __forceinline__ u32 piece_column() {
  constexpr u32 IN_ROW = Config::back ? TILE_W / 32 : DEPTH / 32;
  return threadIdx.x % IN_ROW * 32;
}
// The first row of W of a unit's tile, and its first column.
__device__ __forceinline__ u32 first_row(const WorkUnit& at) {
  return Config::back ? at.depth * DEPTH : at.row_tile * TILE_W;
}
__device__ __forceinline__ u32 first_column(const WorkUnit& at) {
  return Config::back ? at.row_tile * TILE_W : at.depth * DEPTH;
}

// The units of a run, one after the other, as this thread copies them: of each its x, and W of the one after it, since
// W is decoded ahead. A stage's copies are sent in four parts, between MMAs. Beyond the ends of W and x, and of the
// run, there are zeros.
class Copies {
 public:
  // start: the address of shared memory. Units `first` to `last`.
  __device__ Copies(const Arguments& a, u32 start, u32 first, u32 last)
      : start_(start), x_left_(last - first), w_left_(last - first), x_at_(a, first), w_at_(a, first) {}

  // W of the next unit, in a group with what was sent before.
  __device__ __forceinline__ void send_w(const Arguments& a) {
    const u32 row = first_row(w_at_), k = first_column(w_at_) + piece_column();
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
      const u32 n = row + piece_row(i);
      const bool exists = w_left_ > 0 && n < a.n && k < a.k;
      const u8* from = a.packed + (exists ? (u64(n) * a.k + k) / 2 : 0);
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
    const u32 m = x_at_.column_tile * TILE_M + row;
    from_ = a.aligned + (u64(m) * a.pitch + first);
    to_ = start_ + X + x_slot_ * X_BYTES + x_place(row, piece);
    rows_ = x_left_ > 0 && first < a.pitch && m < a.m ? a.m - m : 0;
    x_left_ -= x_left_ > 0;
    advance(x_at_, a);
    if (++x_slot_ == Config::stages) x_slot_ = 0;
  }
  // A quarter of them; with the last one W.
  template <u32 PART> __device__ __forceinline__ void send(const Arguments& a) {
    constexpr u32 STEP = THREADS / 8, COUNT = TILE_M / STEP;
#pragma unroll
    for (u32 i = PART * COUNT / 4; i < (PART + 1) * COUNT / 4; i++) {
      const bool exists = i * STEP < rows_;
      copy_async(to_ + i * (STEP * DEPTH * 2), exists ? from_ + u64(i * STEP) * a.pitch : a.aligned, exists);
    }
    if constexpr (PART == 3) send_w(a);
  }

 private:
  const u32 start_;
  u32 x_left_, w_left_, x_slot_ = 0, w_slot_ = 0;
  WorkUnit x_at_, w_at_;
  const u16* from_;
  u32 to_, rows_;  // of x, from this thread's first one on
};

// The scales of this thread's pieces of a unit.
struct Scales {
  StoredScale stored[PIECES];
  float absmax[NESTED ? PIECES : 1];

  __device__ __forceinline__ void load(const Arguments& a, const WorkUnit& at) {
    const u32 row = first_row(at), k = first_column(at) + piece_column();
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
      const u32 n = row + piece_row(i);
      stored[i] = 0;  // of weights that do not exist
      if constexpr (NESTED) absmax[i] = 0;
      if (n >= a.n || k >= a.k) continue;
      const u32 block = (n * (a.k / 32) + k / 32) >> a.shift;
      stored[i] = __ldg(a.scale + block);
      if constexpr (NESTED) absmax[i] = __ldg(a.absmax + (block >> 8));
    }
  }
  __device__ __forceinline__ float decode(u32 i, float offset) const {
    if constexpr (NESTED) {
      const float code = reinterpret_cast<const float*>(memory)[u32(stored[i])];
      return decode_nested(code, absmax[i], offset);
    } else {
      return decode_stored(stored[i]);
    }
  }
};
