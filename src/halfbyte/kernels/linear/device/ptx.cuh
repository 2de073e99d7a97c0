// What the kernels with bulk copies share: shared memory by address, the look-up of two weights in it, barriers, copies
// that end at a barrier, the words of programmatic launch, and 16-bit numbers.
// Needs sm_90.
// Macros: FP16.

typedef unsigned u32;
typedef unsigned long long u64;

constexpr u32 BASE = 1024;  // where dynamic shared memory begins on sm_90 and later; every kernel checks it
constexpr u32 TABLE_ROW = 256;  // bytes, of the table that it begins with: two weights for each lane, in the lower half

// From the table that dynamic shared memory begins with.
__device__ __forceinline__ u32 load_word(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(address), "n"(BASE));
  return value;
}
// A lane's column of the table: its place in a row, and what is on top of `shared`, in a cluster the CTA's rank.
__device__ __forceinline__ u32 column_of(u32 shared, u32 lane) { return lane * 4 | shared & ~0u << 24; }
// The two numbers of byte J of `bytes`, which is the row of the table.
template <int J> __device__ __forceinline__ u32 look_up(u32 bytes, u32 column) {
  return load_word(__byte_perm(bytes, column, 0x7604 | (J << 4)));
}
__device__ __forceinline__ uint2 load_pair(u32 address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_word(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_four(u32 address, u32 value) {  // copies of it, at a multiple of 16 bytes
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ float4 load_sums(u32 address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w) : "r"(address));
  return value;
}

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

// Until the kernel ahead in the stream is done, and all that it wrote can be read.
__device__ __forceinline__ void wait_for_the_one_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// It begins when every CTA of this kernel has said so, or has ended.
__device__ __forceinline__ void let_the_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ float from_fp16(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}
__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float unpack(u32 bits) { return FP16 ? from_fp16(bits) : from_bf16(bits); }
// Two fp32 numbers, rounded, the first in the low half.
__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
#if FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
  return word;
}

// The table, by BY warps; in a cluster `table` has the CTA's rank on top. Four of its rows at a time, of which a lane writes
// four copies of a word.
template <u32 BY>
__device__ __forceinline__ void make_table(u32 table, const float (&codebook)[16], bool low_first, u32 warp, u32 lane) {
  const u32 own = pack(codebook[lane % 16], 0);
#pragma unroll
  for (u32 i = 0; i < (64 + BY - 1) / BY; i++) {
    const u32 four = i * BY + warp, byte = 4 * four + lane / 8;
    const u32 high = __shfl_sync(~0u, own, byte >> 4), low = __shfl_sync(~0u, own, byte & 15);
    if (four < 64) store_four(table + byte * TABLE_ROW + lane % 8 * 16, low_first ? low | high << 16 : high | low << 16);
  }
}
