// Four matrices of eight rows of 16 bytes from shared memory, of which lane 8 i + j says where row j of matrix i is.

#include "numeric.cuh"

// Of matrix i, a lane gets numbers 2 (lane % 4) and the next of row lane / 4.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}
// Four times 8 rows by 16 bytes, transposed: of matrix i, a lane gets two neighbouring bytes of rows 2 (lane % 4) and
// the next.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}
