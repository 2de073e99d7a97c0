// What is to be done by kernel.cu, and where: sizes, the layout of shared memory, arguments, and units of work.
// Macros and needs are those of kernel.cu.

#include "device/decode.cuh"
#include "device/epilogue.cuh"
#include "device/pipeline.cuh"
#include "device/scale.cuh"
#include "device/split_k.cuh"
#include "device/wgmma.cuh"

constexpr int WARPS = 4 * Config::warpgroups, TILE_N = 64 * Config::warpgroups, UNIT_K = 256,
              SPANS = UNIT_K / Config::span, STEPS = Config::span / 16;
constexpr int WORDS = Config::span / 32;  // of W, that a lane takes of a row's span
constexpr int SUMS = sums_of(Config::tile_m);
// Spans that are summed up before they are scaled. With vector no row begins within a block of weights that share a
// scale.
constexpr int BLOCK_SPANS = (1 << Config::log_block) / Config::span, JOINED = !Config::vector       ? 1
                                                                              : BLOCK_SPANS < SPANS ? BLOCK_SPANS
                                                                                                    : SPANS;
constexpr int UNIT_SCALES = SPANS / JOINED;  // scales of a row in a unit
constexpr int THREADS = 128 * (Config::warpgroups + 1);
constexpr u32 W_BYTES = TILE_N * UNIT_K / 2, X_BYTES = Config::tile_m * UNIT_K * 2, SCALE_BYTES = SPANS * TILE_N * 4;
constexpr u32 STAGE_BYTES =
    W_BYTES + (Config::resident ? 0 : X_BYTES);  // x comes with W, or is resident for all units of the CTA
constexpr u32 BARRIERS = 256 * TABLE_ROW, TILES = BARRIERS + 1024, X_RESIDENT = TILES + Config::stages * STAGE_BYTES,
              SCALE = X_RESIDENT + Config::resident * X_BYTES;

static_assert(SCALE + Config::stages * SCALE_BYTES == Config::shared_bytes, "plan.py reckons with other sizes");
static_assert((Config::tile_m / 8 + Config::cluster - 1) / Config::cluster * Config::cluster * WARPS * 512 <=
                  Config::stages * STAGE_BYTES,
              "sums take the stage of W");
constexpr u32 FULL = BARRIERS, EMPTY = FULL + 64;
extern __shared__ __align__(1024) unsigned char memory[];
// Where it begins: in a cluster the CTA's rank is on top of BASE.
__device__ __forceinline__ u32 shared() { return Config::cluster > 1 ? u32(__cvta_generic_to_shared(memory)) : BASE; }
constexpr u32 SPAN_WORDS = Config::span / 2,
              OWN = Config::span / 8;  // two neighbouring k are a word: of a span, and of a quad's member

struct Arguments {
  alignas(64) unsigned char map[128];  // the tensor map of packed
  const void* scale;
  const float *code, *absmax, *offset;
  const unsigned short *x, *bias;  // bias: null for none
  unsigned short* y;
  uint4* arranged;
  float4 *workspace,
      *stale;  // all SENTINEL before this launch; what the one before has stale, to be MISSING after this one
  u32 stale_count, m, n, k, row_tiles, column_tiles, depth_units, ctas;  // depth_units: units of 256 along K
  float unit, codebook[16];
};

// The value of a scale byte, which each lane has in the upper half of a row of the table.
__device__ __forceinline__ float load_code(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1 + %2];" : "=f"(value) : "r"(address), "n"(BASE + 128));
  return value;
}
// CTAs of `multiply` are started in the order of blockIdx. Their work goes the other way, so that none waits for one
// after it. Those of a cluster are started together.
__device__ __forceinline__ u32 own_number() {
  return Config::cluster > 1 ? blockIdx.x * Config::cluster + blockIdx.y : gridDim.x - 1 - blockIdx.x;
}

// The meetings of all its warps: the barriers and the table are ready; and x is resident, for which those that fetch
// wait only if they have nothing else to wait for (scales that come without codes): x would queue behind more of W.
// They wait before the third unit; before the second where there is much of x, and scales that come one by one or W
// that is read twice.
constexpr bool PRODUCERS_WAIT = !NESTED;
__device__ __forceinline__ u32 units_before_x(const Arguments& a) {
  return Config::tile_m < 32 || (Config::vector && a.column_tiles == 1) ? 2 : 1;
}
__device__ __forceinline__ void sync_all() { asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void sync_x() {
  asm volatile("bar.sync 3, %0;" ::"n"(PRODUCERS_WAIT ? THREADS : 32 * WARPS) : "memory");
}
