// Sizes, and the layout of shared memory of kernel.cu, which says what Config holds.

#include "device/cluster_reduce.cuh"
#include "device/decode.cuh"
#include "device/laid_out.cuh"
#include "device/pipeline.cuh"
#include "device/scale.cuh"
#include "device/wgmma.cuh"

constexpr int WARPS = 4 * Config::warpgroups;  // that multiply
constexpr int THREADS = 128 * (Config::warpgroups + 1);
constexpr int TILE_N = 64 * Config::warpgroups, UNIT_K = 256;
constexpr int TILE_ROWS = Config::paired ? TILE_N / 2 : TILE_N;          // of each weight in a tile
constexpr int SPANS = UNIT_K / Config::span, STEPS = Config::span / 16;  // spans a unit, MMAs a span
constexpr int WORDS = Config::span / 32;                                 // of W, that a lane takes of a row's span
constexpr int SUMS = sums_of(Config::tile_m);

// What multiplies would wait for ever for more registers than the producer leaves.
static_assert(Config::producer_registers + Config::warpgroups * Config::consumer_registers <=
                  (Config::warpgroups + 1) * Config::registers,
              "there are no more");
// Whether there are registers for what sums are combined with before they are complete.
constexpr bool OTHERS_FIRST = Config::tile_m <= 64;

// How many spans are summed before they are scaled. No row begins within a block whose scale is loaded with others.
constexpr int BLOCK_SPANS = (1 << Config::log_block) / Config::span;
constexpr int SPANS_OR_BLOCK = BLOCK_SPANS < SPANS ? BLOCK_SPANS : SPANS;
constexpr int JOINED = Config::loads != Loads::one ? SPANS_OR_BLOCK : 1;
constexpr int UNIT_SCALES = SPANS / JOINED;  // of a row of W

constexpr bool LANE_SPANS = false, IN_ORDER = false, LAYS_UNITS = Config::grouped;  // row_place.cuh, lay_out.cuh
// In words, each two neighbouring k: a span, and what a quad's lane takes of it.
constexpr u32 SPAN_WORDS = Config::span / 2, OWN = Config::span / 8;

// Shared memory: the table, barriers, stages of W (and of x, unless it is resident), resident x, decoded scales. Beside
// the widest tiles there is no room for these: they are in the last quarters of the table's rows, and a code of scales
// has 16 copies in front of them, not 32.
constexpr bool SCALES_IN_TABLE = Config::scales_in_table;
constexpr u32 CODE_COPIES = SCALES_IN_TABLE ? 16 : 32;
constexpr u32 W_BYTES = TILE_N * UNIT_K / 2, X_BYTES = Config::tile_m * UNIT_K * 2;
// From those of a span to those of the next, and of a stage.
constexpr u32 SPAN_SCALES = TILE_N * 4 * (SCALES_IN_TABLE ? 4 : 1), STAGE_SCALES = SPANS * SPAN_SCALES;
constexpr u32 STAGE_BYTES = W_BYTES + (Config::resident ? 0 : X_BYTES);
constexpr u32 BARRIERS = 256 * TABLE_ROW, FULL = BARRIERS, EMPTY = FULL + 64, SUMS_FULL = FULL + 128;
constexpr u32 TILES = BARRIERS + 1024;
constexpr u32 X_RESIDENT = TILES + Config::stages * STAGE_BYTES;
constexpr u32 BEHIND_X = X_RESIDENT + Config::resident * X_BYTES, SCALE = SCALES_IN_TABLE ? 192 : BEHIND_X;
static_assert(BEHIND_X + (SCALES_IN_TABLE ? 0 : Config::stages * STAGE_SCALES) == Config::shared_bytes,
              "plan.py reckons with other sizes");
static_assert(!SCALES_IN_TABLE || Config::stages * STAGE_SCALES <= 256 * TABLE_ROW, "the table has no more rows");
// Where a span's scale is whose place among its own is byte `at`.
__device__ __forceinline__ u32 scale_place(u32 at) { return SCALES_IN_TABLE ? at / 64 * TABLE_ROW + at % 64 : at; }
constexpr int SUM_GROUPS = (Config::tile_m / 8 + Config::cluster - 1) / Config::cluster * Config::cluster;
static_assert(Config::cluster == 1 || SUM_GROUPS * WARPS * 512 <= Config::stages * STAGE_BYTES,
              "the cluster reduce reuses the stages of W");

extern __shared__ __align__(1024) unsigned char memory[];
// The address of shared memory. In a cluster the CTA's rank is on top of BASE.
__device__ __forceinline__ u32 shared() { return Config::cluster > 1 ? u32(__cvta_generic_to_shared(memory)) : BASE; }

// The value of a scale byte, of which lanes have copies in the upper half of a row of the table.
__device__ __forceinline__ float load_code(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1 + %2];" : "=f"(value) : "r"(address), "n"(BASE + 128));
  return value;
}
// The hardware starts CTAs in the order of blockIdx, and in `fix_up` a CTA waits for CTAs of higher numbers only; so
// numbers go the other way, and whoever is waited for has started. CTAs of a cluster start together.
__device__ __forceinline__ u32 number_in_launch() {
  return Config::cluster > 1 ? blockIdx.x * Config::cluster + blockIdx.y : gridDim.x - 1 - blockIdx.x;
}
// Among those that share the work with its weight.
__device__ __forceinline__ u32 own_number(const Arguments& a) {
  return number_in_launch() - (Config::parts > 1 ? a.first_cta : 0);
}

// Of a tile, the first row of W.
template <class Unit> __device__ __forceinline__ u32 first_row(const Unit& at) { return at.row_tile * TILE_ROWS; }

// Two barriers of all warps. sync_all: pipeline barriers and table are ready. sync_x: x is resident. The producer waits
// at sync_x only where it does not wait for codes of scales anyway; else x would queue behind more of W. It waits
// before the third unit, or before the second where x is large and scales come one by one or W is read twice.
constexpr bool PRODUCERS_WAIT = !NESTED;
__device__ __forceinline__ u32 units_before_x(const Arguments& a) {
  return Config::tile_m < 32 || (Config::loads != Loads::one && a.column_tiles == 1) ? 2 : 1;
}
__device__ __forceinline__ void sync_all() { meet<2, THREADS>(); }
__device__ __forceinline__ void sync_x() { meet<3, PRODUCERS_WAIT ? THREADS : 32 * WARPS>(); }
