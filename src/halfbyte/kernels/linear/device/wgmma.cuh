// Hopper's tensor cores: wgmma of a warpgroup's 64 rows of W by Columns rows of x (8, 16, 24, 48, 80, 112, and 32 to
// 256 in steps of 32), m64nColumnsk16 with fp32 sums. Needs sm_90a.
//
// W is the A operand as in device/mma.cuh, in registers, and out.T = W @ x.T: warp w of the four has rows 16 w to 16 w
// + 15, its lanes have of A and of the sums what they have of m16n8k16, sums 4 i to 4 i + 3 being those of columns 8 i
// to 8 i + 7. x is in shared memory.

#include "numeric.cuh"

// A thread's fp32 sums, of 16 rows of W and `columns` rows of x a warp.
__device__ constexpr int sums_of(int columns) { return columns / 2; }

#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define D4 "%0,%1,%2,%3"
#define D8 D4 ",%4,%5,%6,%7"
#define D12 D8 ",%8,%9,%10,%11"
#define D16 D12 ",%12,%13,%14,%15"
#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)
#define D24 D16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define D32 D24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define D40 D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define D48 D40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define D56 D48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define D64 D56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define D80 D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define D96 D80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define D112 D96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define D128 D112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// Takes a shape, the operands of its sums, six operands behind these, and the sums. ISSUE is what issues it.
#define WGMMA(shape, ...)                                         \
  if constexpr (FP16) ISSUE(shape, ".f32.f16.f16 ", __VA_ARGS__); \
  else ISSUE(shape, ".f32.bf16.bf16 ", __VA_ARGS__)
// Of the shape with as many sums.
#define MULTIPLY                                                                                                  \
  if constexpr (Sums == sums_of(8)) {                                                                             \
    WGMMA("m64n8k16", D4, "%4", "%5", "%6", "%7", "%8", "%9", F4(0));                                             \
  } else if constexpr (Sums == sums_of(16)) {                                                                     \
    WGMMA("m64n16k16", D8, "%8", "%9", "%10", "%11", "%12", "%13", F4(0), F4(4));                                 \
  } else if constexpr (Sums == sums_of(24)) {                                                                     \
    WGMMA("m64n24k16", D12, "%12", "%13", "%14", "%15", "%16", "%17", F4(0), F4(4), F4(8));                       \
  } else if constexpr (Sums == sums_of(32)) {                                                                     \
    WGMMA("m64n32k16", D16, "%16", "%17", "%18", "%19", "%20", "%21", F16(0));                                    \
  } else if constexpr (Sums == sums_of(48)) {                                                                     \
    WGMMA("m64n48k16", D24, "%24", "%25", "%26", "%27", "%28", "%29", F16(0), F4(16), F4(20));                    \
  } else if constexpr (Sums == sums_of(64)) {                                                                     \
    WGMMA("m64n64k16", D32, "%32", "%33", "%34", "%35", "%36", "%37", F16(0), F16(16));                           \
  } else if constexpr (Sums == sums_of(80)) {                                                                     \
    WGMMA("m64n80k16", D40, "%40", "%41", "%42", "%43", "%44", "%45", F16(0), F16(16), F4(32), F4(36));           \
  } else if constexpr (Sums == sums_of(96)) {                                                                     \
    WGMMA("m64n96k16", D48, "%48", "%49", "%50", "%51", "%52", "%53", F16(0), F16(16), F16(32));                  \
  } else if constexpr (Sums == sums_of(112)) {                                                                    \
    WGMMA("m64n112k16", D56, "%56", "%57", "%58", "%59", "%60", "%61", F16(0), F16(16), F16(32), F4(48), F4(52)); \
  } else if constexpr (Sums == sums_of(128)) {                                                                    \
    WGMMA("m64n128k16", D64, "%64", "%65", "%66", "%67", "%68", "%69", F64(0));                                   \
  } else if constexpr (Sums == sums_of(160)) {                                                                    \
    WGMMA("m64n160k16", D80, "%80", "%81", "%82", "%83", "%84", "%85", F64(0), F16(64));                          \
  } else if constexpr (Sums == sums_of(192)) {                                                                    \
    WGMMA("m64n192k16", D96, "%96", "%97", "%98", "%99", "%100", "%101", F64(0), F16(64), F16(80));               \
  } else if constexpr (Sums == sums_of(224)) {                                                                    \
    WGMMA("m64n224k16", D112, "%112", "%113", "%114", "%115", "%116", "%117", F64(0), F16(64), F16(80), F16(96)); \
  } else {                                                                                                        \
    static_assert(Sums == sums_of(256), "there is no shape for so many rows of x");                               \
    WGMMA("m64n256k16", D128, "%128", "%129", "%130", "%131", "%132", "%133", F64(0), F64(64));                   \
  }
#define ASSEMBLY(shape, types, d, a, x, adds, transposes)                                                      \
  "{ .reg .pred p; setp.ne.b32 p, " adds ", 0; wgmma.mma_async.sync.aligned." shape types "{" d "}, " a ", " x \
  ", p, 1, 1, " transposes "; }"

// sum (+)= the warpgroup's 64 rows of A @ 16 k of x at `x_at`, a descriptor; not waited for.
#define ISSUE(shape, types, d, o0, o1, o2, o3, o4, o5, ...)                            \
  asm volatile(ASSEMBLY(shape, types, d, "{" o0 "," o1 "," o2 "," o3 "}", o4, o5, "0") \
               : __VA_ARGS__                                                           \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x_at), "r"(adds))
template <int Sums>
__device__ __forceinline__ void multiply_add(float (&sum)[Sums], u32 a0, u32 a1, u32 a2, u32 a3, u64 x_at, int adds) {
  MULTIPLY;
}
#undef ISSUE

// The same with A in shared memory, at `a_at`, a descriptor, too: 16 k, each with its 64 rows side by side.
#define ISSUE(shape, types, d, o0, o1, o2, o3, o4, o5, ...) \
  asm volatile(ASSEMBLY(shape, types, d, o0, o1, o2, "1, 0") : __VA_ARGS__ : "l"(a_at), "l"(x_at), "r"(adds))
template <int Sums>
__device__ __forceinline__ void multiply_add_at(float (&sum)[Sums], u64 a_at, u64 x_at, int adds) {
  MULTIPLY;
}
#undef ISSUE
#undef ASSEMBLY
#undef MULTIPLY
#undef F4
#undef F16
#undef F64
#undef D4
#undef D8
#undef D12
#undef D16
#undef D24
#undef D32
#undef D40
#undef D48
#undef D56
#undef D64
#undef D80
#undef D96
#undef D112
#undef D128
#undef WGMMA

// Registers that were written are seen by the products after it.
__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products since the last time are a group.
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last `Open` groups are done.
template <int Open> __device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Open) : "memory");
}

// Where wgmma finds x: tiles of 8 rows of 128 bytes with their 16-byte pieces swizzled, one after the other. The lower
// half of a descriptor has the address in 16 bytes, to which those of tiles and steps can be added.
__device__ __forceinline__ u32 lower_half(u32 address) { return address / 16 | 1 << 16; }
__device__ __forceinline__ u64 descriptor(u32 lower) { return u64(1u << 30 | 1024 / 16) << 32 | lower; }
