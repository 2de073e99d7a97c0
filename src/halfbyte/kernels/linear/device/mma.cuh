// The tensor cores' product, mma.m16n8k16 with fp32 sums.
//
// W is the A operand: out.T = W @ x.T, so the MMA's 16 rows are rows of W (N), its 8 columns are rows of x (M), and a
// register of A is two neighbouring k of one row of W, which is one packed byte. With group = lane / 4 and
// member = lane % 4 a lane has
//
//            k = 2 * member, + 1     2 * member + 8, + 9             x.T        column group
//   A  row group      a0                     a2             B  k = 2 * member, + 1       b0
//      row group + 8  a1                     a3                2 * member + 8, + 9       b1
//
//              column 2 * member     2 * member + 1
//   D  row group     sum[0]              sum[1]
//      row group + 8 sum[2]              sum[3]
//
// K may be permuted as long as x is permuted alike, so a lane takes neighbouring bytes of W for its k. Rows may be,
// too: a kernel says which row of its tile it takes for `group` and for `group + 8`.
//
// Config::mma_k: 16, or 8 on sm_75, which has only half of it; the halves of k are then operands of their own.

#include "numeric.cuh"

#define MMA_K16(types)                                                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col" types "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                          \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
#define MMA_K8(types)                                                                                  \
  asm volatile("mma.sync.aligned.m16n8k8.row.col" types                                                \
               "{%0,%1,%2,%3}, {%4,%5}, {%8}, {%0,%1,%2,%3};\n"                                        \
               "mma.sync.aligned.m16n8k8.row.col" types "{%0,%1,%2,%3}, {%6,%7}, {%9}, {%0,%1,%2,%3};" \
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))

__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (Config::mma_k == 8) {
    if constexpr (FP16) MMA_K8(".f32.f16.f16.f32 ");
    else MMA_K8(".f32.bf16.bf16.f32 ");
  } else {
    if constexpr (FP16) MMA_K16(".f32.f16.f16.f32 ");
    else MMA_K16(".f32.bf16.bf16.f32 ");
  }
}
#undef MMA_K16
#undef MMA_K8
