// The head of a language model: y[m, n] = sum over k of x[m, k] * W[n, k] (+ bias[n]) for up to 8 * m_tiles rows of x.
// W is not quantized: of the weights of a step, checkpoints leave the largest in 16 bits.
//
// Bytes: 2 N K, once; x and y are small beside them. Flops: 2 M N K.
//
// Operands. out.T = W @ x.T by mma.m16n8k16 (linear/device/mma.cuh): 16 rows of W by eight of x. A product's K may be
// permuted if both of its operands are, so a lane loads 16 bytes of a row, which are its part of two MMAs.
//
// Work. CTAs take tiles of 16 rows of W in turn. A producer warp copies a tile to shared memory in `pieces` along K,
// each of them a stage; copies shorter than 2 KB come slower than memory has them. Every multiplying warp has its part
// of K in each piece, and keeps its x in registers throughout. A last warp adds up what they have, always in the same
// order.
//
// Launch. W was written long ago, so stages are filled while the kernel ahead still runs, and only x is waited for.
//
// Needs sm_90, K % 32 == 0, x and W aligned to 16 bytes.
//
// Config: x; k; m_tiles; warps, that multiply; pieces, of K; stages; bias: whether there is one; overlaps: the kernel
// may begin before the one ahead has ended; mma_k: 16; shared_bytes.

#include "linear/device/mma.cuh"
#include "linear/device/pipeline.cuh"

constexpr u32 TILE = 16, UNIT = 32;  // rows of W; numbers of K that a quad of lanes has in 16 bytes each
constexpr u32 THREADS = 32 * (Config::warps + 2);
constexpr u32 SLICE = Config::k / UNIT / Config::pieces / Config::warps;  // units of a warp in a piece
static_assert(SLICE * Config::warps * Config::pieces * UNIT == Config::k, "warps share a piece evenly");
constexpr u32 PIECE = 2 * Config::k / Config::pieces;  // bytes of a row,
constexpr u32 PITCH = PIECE + (PIECE % 128 ? 0 : 64);  // and from row to row: two that follow share no bank
constexpr u32 STAGE = TILE * PITCH, SUM = Config::m_tiles * 512, SUM_BUFFERS = 2;  // SUM: bytes of a warp's sums

// Shared memory: barriers, sums, stages.
constexpr u32 FULL = 0, EMPTY = 8 * Config::stages, SUM_FULL = 2 * EMPTY, SUM_EMPTY = SUM_FULL + 8 * SUM_BUFFERS;
constexpr u32 SUMS = (SUM_EMPTY + 8 * SUM_BUFFERS + 127) / 128 * 128;
constexpr u32 STAGES = SUMS + SUM_BUFFERS * Config::warps * SUM;
static_assert(STAGES + Config::stages * STAGE == Config::shared_bytes, "launch.py asks for as much");

extern __shared__ __align__(128) unsigned char memory[];

struct Arguments {
  const u16 *x, *weight, *bias;
  u16* y;
  u32 m, n;
};

// Which rows of W a CTA takes, one tile after the other: every gridDim.x-th, so that all read near each other, and of
// those that are left over as many as the others.
class Walk {
 public:
  u32 row, rows;  // of the tile: where it begins, and how many there are

  __device__ __forceinline__ explicit Walk(const Arguments& a) : a(a), whole(a.n / (TILE * gridDim.x)) { find(); }
  __device__ __forceinline__ bool is_there() const { return turn <= whole && rows > 0; }
  __device__ __forceinline__ void next() { turn++, find(); }

 private:
  const Arguments& a;
  u32 whole, turn = 0;  // turns of all CTAs in which tiles are whole, and behind which there is one more

  __device__ __forceinline__ void find() {
    const u32 first = turn * TILE * gridDim.x, left = min(a.n - first, TILE * gridDim.x);
    row = first + left * blockIdx.x / gridDim.x, rows = first + left * (blockIdx.x + 1) / gridDim.x - row;
  }
};
__device__ __forceinline__ void wait_for_x() {
  if constexpr (Config::overlaps) wait_for_prior_kernel();
}

// It makes the barriers, and meets the others once all stages are asked for.
__device__ __forceinline__ void produce(const Arguments& a, u32 shared, u32 lane) {
  if (lane == 0) {
    for (u32 s = 0; s < Config::stages; s++)
      init(shared + FULL + 8 * s, 1), init(shared + EMPTY + 8 * s, 32 * Config::warps);
    for (u32 s = 0; s < SUM_BUFFERS; s++)
      init(shared + SUM_FULL + 8 * s, 32 * Config::warps), init(shared + SUM_EMPTY + 8 * s, 32);
    publish_barriers();
  }
  __syncwarp();
  const u64 policy = leaving_first();
  bool alone = true;
  Ring ring(1);
  for (Walk walk(a); walk.is_there(); walk.next()) {
    for (u32 piece = 0; piece < Config::pieces; piece++, ring.next(Config::stages)) {
      if (alone && ring.parity == 0) alone = false, __syncthreads();
      const u32 full = shared + FULL + 8 * ring.at, to = shared + STAGES + ring.at * STAGE + lane * PITCH;
      wait(shared + EMPTY + 8 * ring.at, ring.parity);
      if (lane == 0) expect(full, walk.rows * PIECE);
      __syncwarp();
      const u16* from = a.weight + u64(walk.row + lane) * Config::k + piece * (PIECE / 2);
      if (lane < walk.rows) copy_as(policy, to, from, PIECE, full);
    }
  }
  if (alone) __syncthreads();
}

__device__ __forceinline__ void multiply(const Arguments& a, u32 shared, u32 warp, u32 lane) {
  const u32 group = lane / 4, member = lane % 4;
  wait_for_x();
  uint4 x[Config::m_tiles][Config::pieces][SLICE];
#pragma unroll
  for (u32 c = 0; c < Config::m_tiles; c++)
#pragma unroll
    for (u32 piece = 0; piece < Config::pieces; piece++)
#pragma unroll
      for (u32 i = 0; i < SLICE; i++) {
        const u32 row = 8 * c + group, unit = (piece * Config::warps + warp) * SLICE + i;
        const u16* from = a.x + row * Config::k + unit * UNIT + member * 8;
        x[c][piece][i] = row < a.m ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      }
  if constexpr (Config::overlaps) launch_dependents();
  __syncthreads();
  Ring ring(0), sums(1);
  const u32 mine = shared + STAGES + group * PITCH + warp * (SLICE * 2 * UNIT) + member * 16;
  for (Walk walk(a); walk.is_there(); walk.next(), sums.next(SUM_BUFFERS)) {
    float sum[Config::m_tiles][4] = {};
#pragma unroll
    for (u32 piece = 0; piece < Config::pieces; piece++, ring.next(Config::stages)) {
      wait(shared + FULL + 8 * ring.at, ring.parity);
#pragma unroll
      for (u32 i = 0; i < SLICE; i++) {
        const u32 at = mine + ring.at * STAGE + i * (2 * UNIT);
        const uint4 upper = load_four_words(at), lower = load_four_words(at + 8 * PITCH);
#pragma unroll
        for (u32 c = 0; c < Config::m_tiles; c++) {
          const uint4 of_x = x[c][piece][i];
          mma(sum[c], upper.x, lower.x, upper.y, lower.y, of_x.x, of_x.y);
          mma(sum[c], upper.z, lower.z, upper.w, lower.w, of_x.z, of_x.w);
        }
      }
      arrive(shared + EMPTY + 8 * ring.at);
    }
    wait(shared + SUM_EMPTY + 8 * sums.at, sums.parity);
    const u32 to = shared + SUMS + (sums.at * Config::warps + warp) * SUM + lane * 16;
#pragma unroll
    for (u32 c = 0; c < Config::m_tiles; c++)
      store_sums(to + c * 512, make_float4(sum[c][0], sum[c][1], sum[c][2], sum[c][3]));
    arrive(shared + SUM_FULL + 8 * sums.at);
  }
}

// The sum of row number `number` of a tile and x's row `m`, rounded, where both are there.
__device__ __forceinline__ void store_sum(const Arguments& a, const Walk& walk, u32 m, u32 number, float sum) {
  if (m >= a.m || number >= walk.rows) return;
  const u32 row = walk.row + number;
  if constexpr (Config::bias) sum += unpack(a.bias[row]);
  a.y[u64(m) * a.n + row] = narrow(sum);
}

__device__ __forceinline__ void reduce(const Arguments& a, u32 shared, u32 lane) {
  wait_for_x();  // after which nobody reads what was where y is
  __syncthreads();
  const u32 group = lane / 4, member = lane % 4;
  Ring sums(0);
  for (Walk walk(a); walk.is_there(); walk.next(), sums.next(SUM_BUFFERS)) {
    wait(shared + SUM_FULL + 8 * sums.at, sums.parity);
#pragma unroll
    for (u32 c = 0; c < Config::m_tiles; c++) {
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
      for (u32 w = 0; w < Config::warps; w++) {
        const float4 sum = load_sums(shared + SUMS + (sums.at * Config::warps + w) * SUM + c * 512 + lane * 16);
        total.x += sum.x, total.y += sum.y, total.z += sum.z, total.w += sum.w;
      }
      const u32 m = 8 * c + 2 * member;
      store_sum(a, walk, m, group, total.x), store_sum(a, walk, m + 1, group, total.y);
      store_sum(a, walk, m, group + 8, total.z), store_sum(a, walk, m + 1, group + 8, total.w);
    }
    arrive(shared + SUM_EMPTY + 8 * sums.at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) head(const __grid_constant__ Arguments a) {
  const u32 shared = u32(__cvta_generic_to_shared(memory)), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < Config::warps) multiply(a, shared, warp, lane);
  else if (warp == Config::warps) produce(a, shared, lane);
  else reduce(a, shared, lane);
}
