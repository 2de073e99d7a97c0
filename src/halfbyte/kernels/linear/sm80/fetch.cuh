// What comes from memory: a stage's W and x, and the scales of a unit.

#include "work.cuh"

// The stages of a run of units, one after the other, as this thread copies them: in all stages the pieces that lie in
// one place of their row, of rows an equal step apart. In the place of rows that do not exist comes the last one: what
// it gives there is not stored. Beyond K there are zeros.
class Copies {
 public:
  // ring: the address of the first stage. Units `first` to `last`.
  __device__ Copies(const Arguments& a, u32 ring, u32 first, u32 last)
      : w_to_(kept(ring + w_place(W_ROW(), W_PIECE()))),
        x_to_(kept(ring + x_place(X_ROW(), X_PIECE()))),
        left_((last - first) * UNIT_STAGES),
        at_(a, first) {
    if (left_ > 0) begin_tile(a);
  }

  // Sends for the next stage, if there is one.
  __device__ __forceinline__ void send(const Arguments& a) {
    if (left_ > 0) {
      const bool in_w = k_ + 32 * W_PIECE() < a.k, in_x = k_ + 8 * X_PIECE() < a.k;
#pragma unroll
      for (u32 i = 0; i < W_COPIES; i++) {
        if (TILE_N % W_STEP && W_ROW() + i * W_STEP >= TILE_N) break;
        copy_async(w_to_ + slot_ * STAGE_BYTES + i * (W_STEP * W_PIECES * 16), w_ + w_offset_[i], in_w);
      }
#pragma unroll
      for (u32 i = 0; i < X_COPIES; i++) {
        if (TILE_M % X_STEP && X_ROW() + i * X_STEP >= TILE_M) break;
        copy_async(x_to_ + slot_ * STAGE_BYTES + i * (X_STEP * X_PIECES * 16), x_ + x_offset_[i], in_x);
      }
      left_--;
      k_ += TILE_K, w_ += TILE_K / 2, x_ += 2 * TILE_K;
      if (k_ == a.depth_units * (UNIT_STAGES * TILE_K) && left_ > 0) {
        at_.depth = a.depth_units - 1;
        at_.next(a);
        begin_tile(a);
      }
    }
    if (++slot_ == Config::stages) slot_ = 0;
    close_group();  // empty ones too: groups are counted
  }

 private:
  static constexpr u32 W_STEP = THREADS / W_PIECES, W_COPIES = (TILE_N + W_STEP - 1) / W_STEP;
  static constexpr u32 X_STEP = THREADS / X_PIECES, X_COPIES = (TILE_M + X_STEP - 1) / X_STEP;
  // So a piece and the one a step further down lie in one place of 16 rows of W, or of two of x.
  static_assert(W_STEP % 16 == 0 && X_STEP % 2 == 0);
  __device__ static __forceinline__ u32 W_ROW() { return threadIdx.x / W_PIECES; }
  __device__ static __forceinline__ u32 W_PIECE() { return threadIdx.x % W_PIECES; }
  __device__ static __forceinline__ u32 X_ROW() { return threadIdx.x / X_PIECES; }
  __device__ static __forceinline__ u32 X_PIECE() { return threadIdx.x % X_PIECES; }

  __device__ __forceinline__ void begin_tile(const Arguments& a) {
    k_ = at_.depth * (UNIT_STAGES * TILE_K);
    const u32 n = at_.row_tile * TILE_N, m = at_.column_tile * TILE_M;  // which exist
    w_ = a.packed + (u64(n) * a.k + k_) / 2;
    x_ = reinterpret_cast<const u8*>(a.x + u64(m) * a.k + k_);
#pragma unroll
    for (u32 i = 0; i < W_COPIES; i++)
      w_offset_[i] = min(W_ROW() + i * W_STEP, a.n - 1 - n) * (a.k / 2) + 16 * W_PIECE();
#pragma unroll
    for (u32 i = 0; i < X_COPIES; i++)
      x_offset_[i] = min(X_ROW() + i * X_STEP, a.m - 1 - m) * (a.k * 2) + 16 * X_PIECE();
  }

  const u32 w_to_, x_to_;                        // where this thread's first pieces go in the first stage
  u32 left_, k_, slot_ = 0;                      // stages; where the next begins; where it goes
  const u8 *w_, *x_;                             // the first row of the tile, at k_: the same for all threads
  u32 w_offset_[W_COPIES], x_offset_[X_COPIES];  // bytes from there to this thread's pieces
  WorkUnit at_;                                  // its depth is that of the run's first unit; k_ says more
};

// The scales of one span of a unit, for the rows of W that a lane multiplies. Each lane of a quad has those of another
// of the warp's four spans, so they are loaded and decoded once.
struct UnitScales {
  StoredScale stored[2 * Config::row_groups];
  float absmax[NESTED ? 2 * Config::row_groups : 1];

  // row: the first row of the warp's tile for this lane. k: where the span begins in a unit.
  __device__ __forceinline__ void load(const Arguments& a, const WorkUnit& at, u32 row, u32 k) {
    k += at.depth * (UNIT_STAGES * TILE_K);
    const u32 spans = a.k / SPAN;
#pragma unroll
    for (u32 i = 0; i < 2 * Config::row_groups; i++) {
      const u32 n = at.row_tile * TILE_N + row + i / 2 * 16 + i % 2;
      stored[i] = 0;
      if constexpr (NESTED) absmax[i] = 0;
      if (k >= a.k || n >= a.n) continue;  // times 0, or not stored
      const u32 block = (n * spans + k / SPAN) >> a.shift;
      stored[i] = __ldg(a.scale + block);
      if constexpr (NESTED) absmax[i] = __ldg(a.absmax + (block >> 8));
    }
  }
  __device__ __forceinline__ float decode(u32 i, float offset, float unit) const {
    return decode_scale(stored[i], absmax[NESTED ? i : 0], memory + TABLE_BYTES, offset) * unit;
  }
};

// What a scale is where it is used: the number itself, or, to be folded into weights, a pair of it in the type of x.
template <bool Folds> struct MultiplierOf {
  typedef float Type;
};
template <> struct MultiplierOf<true> {
  typedef u32 Type;
};
typedef MultiplierOf<Config::folds>::Type Multiplier;
__device__ __forceinline__ Multiplier multiplier(float scale) {
  if constexpr (Config::folds) return pack(scale, scale);
  else return scale;
}
