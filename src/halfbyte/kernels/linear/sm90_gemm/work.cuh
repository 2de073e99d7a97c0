// Sizes, and the layout of shared memory of kernel.cu, which says what Config holds.

#include "device/cluster_reduce.cuh"
#include "device/computed.cuh"
#include "device/decode.cuh"
#include "device/laid_out.cuh"
#include "device/pipeline.cuh"
#include "device/scale.cuh"
#include "device/wgmma.cuh"

constexpr int WARPS = 4 * Config::warpgroups;                       // that multiply
constexpr int PRODUCERS = Config::decoders ? Config::decoders : 1;  // warpgroups that bring all
constexpr int THREADS = 128 * (Config::warpgroups + PRODUCERS);
constexpr int TILE_N = 64 * Config::warpgroups;                  // rows of W a tile,
constexpr int TILE_ROWS = Config::paired ? TILE_N / 2 : TILE_N;  // and of each weight
constexpr int UNIT_K = 256, STEP_K = 64;                         // W comes by units, x by steps
constexpr int SPANS = UNIT_K / Config::span;                     // weights that share a scale
constexpr int SUMS = sums_of(Config::tile_m);
constexpr bool WIDE = Config::tile_m > 256;
// Rows of x that one copy brings, 256 at most: twins copy equally many, each to both.
constexpr int X_BOX = Config::tile_m / (Config::twins > 1 ? Config::twins : (Config::tile_m + 255) / 256);
static_assert(X_BOX % 8 == 0, "the swizzle is that of eight rows");
// Of K, what is decoded and multiplied at a time: a part of a step or some of them; and the registers of A that it
// takes.
constexpr int TURN_K = Config::turn_k, TURNS = UNIT_K / TURN_K, OPERANDS = TURN_K / 4;
constexpr int STEP_TURNS = TURN_K < STEP_K ? STEP_K / TURN_K : 1, TURN_STEPS = TURN_K > STEP_K ? TURN_K / STEP_K : 1;
static_assert(2 * TURN_STEPS <= Config::x_stages, "one turn's steps are multiplied while another needs all of its");
// Of wide tiles there are registers for one step's; by halves, one is multiplied while the other is decoded.
constexpr bool ONE_AT_ONCE = WIDE && TURN_K == STEP_K;

// A launch gives all threads as many registers. What multiplies would wait for ever for more than the producer leaves.
constexpr int LAUNCHED_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(PRODUCERS * Config::producer_registers + Config::warpgroups * Config::consumer_registers <=
                  THREADS / 128 * LAUNCHED_REGISTERS,
              "there are no more");

// How many spans share a scale. No row begins within a block whose scale is loaded with others.
constexpr int BLOCK_SPANS = (1 << Config::log_block) / Config::span;
constexpr int JOINED = Config::loads != Loads::one ? (BLOCK_SPANS < SPANS ? BLOCK_SPANS : SPANS) : 1;
constexpr int UNIT_SCALES = SPANS / JOINED;  // of a row of W

// row_place.cuh, lay_out.cuh
constexpr bool LANE_SPANS = Config::lane_spans, IN_ORDER = Config::in_order, LAYS_UNITS = true;
// In words, each two neighbouring k: a span, and what a quad's lane takes of it. Those of `back` keep the order of k.
constexpr u32 SPAN_WORDS = Config::back ? 4 : Config::span / 2, OWN = Config::back ? 1 : Config::span / 8;

// Of W, in a stage: mates share a unit.
constexpr u32 STAGE_ROWS = UNIT_K / Config::mates;  // on the way back

// Shared memory: the table, or operands, if there are any; barriers, codes of nested scales, stages of W, stages of x,
// decoded scales.
constexpr u32 W_BYTES = TILE_N * STAGE_ROWS / 2, X_BYTES = Config::tile_m * UNIT_K * 2,
              X_STEP = Config::tile_m * STEP_K * 2;
// Of a decoded scale. On the way back a thread reads many of them, and what is computed takes 16 bits of each.
constexpr u32 SCALE_ITEM = Config::back && COMPUTES ? 2 : 4;
constexpr u32 SCALE_BYTES = Config::decoders ? 0 : SPANS * TILE_N * SCALE_ITEM / Config::mates;
constexpr u32 W_FULL = Config::mates > 1  ? TURNS * TILE_N * STEP_K * 2
                       : Config::decoders ? Config::x_stages * TILE_N * STEP_K * 2
                       : COMPUTES         ? 0
                                          : 256 * TABLE_ROW,
              W_EMPTY = W_FULL + 64, X_FULL = W_FULL + 128, X_EMPTY = W_FULL + 192, SUMS_FULL = W_FULL + 256,
              OPERANDS_FULL = W_FULL + 384, OPERANDS_EMPTY = OPERANDS_FULL + 8 * Config::warpgroups * TURNS;
constexpr u32 CODE = W_FULL + 1024, W_AT = CODE + 1024 * (1 + Config::paired);
constexpr u32 X_AT = W_AT + Config::w_stages * W_BYTES;
constexpr u32 SCALE = X_AT + Config::x_stages * X_STEP;
constexpr int SUM_GROUPS = (Config::tile_m / 8 + Config::cluster - 1) / Config::cluster * Config::cluster;
static_assert(Config::cluster == 1 || W_AT + SUM_GROUPS * WARPS * 512 <= SCALE, "the cluster reduce reuses the stages");
static_assert(SCALE + Config::w_stages * SCALE_BYTES == Config::shared_bytes, "plan.py reckons with other sizes");

extern __shared__ __align__(1024) unsigned char memory[];
// The address of shared memory. In a cluster the CTA's rank is on top of BASE.
__device__ __forceinline__ u32 shared() { return CLUSTER_CTAS > 1 ? u32(__cvta_generic_to_shared(memory)) : BASE; }

// The hardware starts CTAs in the order of blockIdx, and a CTA waits for CTAs of higher numbers only; so numbers go the
// other way, and whoever is waited for has started. CTAs of a cluster have the same number.
__device__ __forceinline__ u32 number_in_launch() { return gridDim.x - 1 - blockIdx.x; }
// Among those that share the work with its weight.
__device__ __forceinline__ u32 own_number(const Arguments& a) {
  return number_in_launch() - (Config::parts > 1 ? a.first_cta : 0);
}
constexpr bool IN_PAIRS = Config::twins * Config::mates > 1;
// Pipeline barriers and table are ready, and those of the other of a pair: its threads have arrived behind them.
__device__ __forceinline__ void sync_all() {
  meet<2, THREADS>();
  if constexpr (IN_PAIRS) wait_for_cluster();
}
// Of a tile, the first row of W. Twins have neighbouring tiles, which count as one.
template <class Unit> __device__ __forceinline__ u32 first_row(const Unit& at) {
  return (at.row_tile * Config::twins + (Config::twins > 1 ? own_rank() : 0)) * TILE_ROWS;
}
