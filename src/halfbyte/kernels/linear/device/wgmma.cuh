// Hopper's tensor cores: wgmma of a warpgroup's 64 rows of W by WIDTH rows of x, m64nWIDTHk16 with fp32 sums. Needs sm_90a.
//
// W is the A operand as in device/mma.cuh, in registers, and out.T = W @ x.T: warp w of the four has rows 16 w to 16 w + 15,
// its lanes have of A and of the sums what they have of m16n8k16, sums 4 i to 4 i + 3 being those of columns 8 i to 8 i + 7.
// x is in shared memory.
//
// Macros: WIDTH (8, 16, 32 or 64).

#include "numeric.cuh"

constexpr int SUMS = WIDTH / 2;  // fp32 numbers a thread, of 16 rows of W and WIDTH columns a warp

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define D4 "%0,%1,%2,%3"
#define D8 D4 ",%4,%5,%6,%7"
#define D16 D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#if WIDTH == 8
#define SHAPE "m64n8k16"
#define D D4
#define OUTPUTS(d) F4(d, 0)
#define INPUTS "{%4,%5,%6,%7}, %8, p, 1, 1, 0;"
#define CONDITION "%9"
#elif WIDTH == 16
#define SHAPE "m64n16k16"
#define D D8
#define OUTPUTS(d) F4(d, 0), F4(d, 4)
#define INPUTS "{%8,%9,%10,%11}, %12, p, 1, 1, 0;"
#define CONDITION "%13"
#elif WIDTH == 32
#define SHAPE "m64n32k16"
#define D D16
#define OUTPUTS(d) F16(d, 0)
#define INPUTS "{%16,%17,%18,%19}, %20, p, 1, 1, 0;"
#define CONDITION "%21"
#elif WIDTH == 64
#define SHAPE "m64n64k16"
#define D D32
#define OUTPUTS(d) F16(d, 0), F16(d, 16)
#define INPUTS "{%32,%33,%34,%35}, %36, p, 1, 1, 0;"
#define CONDITION "%37"
#endif
#if X_TYPE == TYPE_FP16
#define WGMMA_TYPES ".f32.f16.f16 "
#else
#define WGMMA_TYPES ".f32.bf16.bf16 "
#endif

// sum (+)= the warpgroup's 64 rows of A @ 16 k of x at `x`, not waited for.
__device__ __forceinline__ void multiply_add(float (&sum)[SUMS], u32 a0, u32 a1, u32 a2, u32 a3, u64 x, int adds) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " CONDITION ", 0; wgmma.mma_async.sync.aligned." SHAPE WGMMA_TYPES "{" D "}, " INPUTS " }"
               : OUTPUTS(sum) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x), "r"(adds));
}

// Where wgmma finds x: tiles of 8 rows of 128 bytes with their 16-byte pieces swizzled, one after the other. The lower
// half of a descriptor has the address in 16 bytes, to which those of tiles and steps can be added.
__device__ __forceinline__ u32 lower_half(u32 address) { return address / 16 | 1 << 16; }
__device__ __forceinline__ u64 descriptor(u32 lower) { return u64(1u << 30 | 1024 / 16) << 32 | lower; }
