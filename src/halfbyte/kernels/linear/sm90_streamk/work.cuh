// What is to be done by kernel.cu, and where: sizes, the layout of shared memory, arguments, and units of work.
// Macros and needs are those of kernel.cu.

#include "device/decode.cuh"
#include "device/epilogue.cuh"
#include "device/pipeline.cuh"
#include "device/scale.cuh"
#include "device/scheduler.cuh"
#include "device/wgmma.cuh"

constexpr int WARPS = 4 * GROUPS, ROWS = 64 * GROUPS, DEPTH = 256, SPANS = DEPTH / SPAN, STEPS = SPAN / 16;
// Spans that are summed up before they are scaled. With VECTOR no row begins within a block of weights that share a scale.
constexpr int BLOCK_SPANS = (1 << LOG_BLOCK) / SPAN, TOGETHER = !VECTOR ? 1 : BLOCK_SPANS < SPANS ? BLOCK_SPANS : SPANS;
constexpr int SCALED = SPANS / TOGETHER;  // scales of a row in a unit
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr u32 W_BYTES = ROWS * DEPTH / 2, X_BYTES = WIDTH * DEPTH * 2, SCALE_BYTES = SPANS * ROWS * 4;
constexpr u32 STAGE_BYTES = W_BYTES + (HELD ? 0 : X_BYTES);  // x comes with W, or is held for all units of the CTA
constexpr u32 BARRIERS = 256 * TABLE_ROW, TILES = BARRIERS + 1024, X_HELD = TILES + STAGES * STAGE_BYTES, SCALE = X_HELD + HELD * X_BYTES;
#include "device/split_k.cuh"  // which needs WARPS

static_assert(SCALE + STAGES * SCALE_BYTES == SHARED_BYTES, "plan.py reckons with other sizes");
static_assert((WIDTH / 8 + CLUSTER - 1) / CLUSTER * CLUSTER * WARPS * 512 <= STAGES * STAGE_BYTES, "sums take the room of W");
constexpr u32 FULL = BARRIERS, EMPTY = FULL + 64;
extern __shared__ __align__(1024) unsigned char memory[];
// Where it begins: in a cluster the CTA's rank is on top of BASE.
__device__ __forceinline__ u32 shared() { return CLUSTER > 1 ? u32(__cvta_generic_to_shared(memory)) : BASE; }
constexpr u32 SPAN_WORDS = SPAN / 2, OWN = SPAN / 8;  // two neighbouring k are a word: of a span, and of a quad's member

struct Arguments {
  alignas(64) unsigned char map[128];  // the tensor map of packed
  const void* scale;
  const float *code, *absmax, *offset;
  const unsigned short *x, *bias;  // bias: null for none
  unsigned short* y;
  uint4* arranged;
  float4 *workspace, *left;  // all SENTINEL before this launch; what the one before has left, to be MISSING after this one
  u32 left_count, m, n, k, row_tiles, column_tiles, depth_units, ctas;  // depth_units: units of 256 along K
  float unit, codebook[16];
};

// The value of a scale byte, which each lane has in the upper half of a row of the table.
__device__ __forceinline__ float load_code(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1 + %2];" : "=f"(value) : "r"(address), "n"(BASE + 128));
  return value;
}
// CTAs of `multiply` are started in the order of blockIdx. Their work goes the other way, so that none waits for one after
// it. Those of a cluster are started together.
__device__ __forceinline__ u32 own_number() { return CLUSTER > 1 ? blockIdx.x * CLUSTER + blockIdx.y : gridDim.x - 1 - blockIdx.x; }

// The meetings of all its warps: the barriers and the table are ready; and x is held, for which those that fetch wait only
// if they have nothing else to wait for (scales that come without codes): x would queue behind more of W. They wait before
// the third unit; before the second where there is much of x, and scales that come one by one or W that is read twice.
constexpr bool FETCHERS_WAIT = !NESTED;
__device__ __forceinline__ u32 units_ahead_of_x(const Arguments& a) { return WIDTH < 32 || (VECTOR && a.column_tiles == 1) ? 2 : 1; }
__device__ __forceinline__ void all_are_here() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void x_is_held() { asm volatile("bar.sync 3, %0;" ::"n"(FETCHERS_WAIT ? THREADS : 32 * WARPS) : "memory"); }
