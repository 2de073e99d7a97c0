// CUDA C++ as C++: what a kernel's source needs to run on a CPU (cuda_on_cpu.cpp says how). Numbers are those of a GPU
// but for the order of an MMA's sums. There is nothing of the standard library here: that takes longer to compile than
// a kernel does.

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __expf expf

typedef __SIZE_TYPE__ size_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT64_TYPE__ uint64_t;

struct Index {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}

// -- A CTA ------------------------------------------------------------------------------------------------------------

extern Index gridDim, blockIdx, threadIdx;
extern unsigned char* memory;  // dynamic shared memory

// An address in shared memory: of the cluster's CTA whose number is in the top byte. Dynamic shared memory begins at
// 1024 on a Hopper.
unsigned address_of(const void* place);
unsigned address_of_rank(unsigned address, unsigned rank);  // the same place in another CTA of the cluster
unsigned char* place_of(unsigned address, size_t bytes);  // counts it if a CTA does not have that
inline size_t __cvta_generic_to_shared(const void* place) { return address_of(place); }
template <class T> T loaded(unsigned address) {
  T value;
  __builtin_memcpy(&value, place_of(address, sizeof(T)), sizeof(T));
  return value;
}
template <class T> void stored(unsigned address, T value) {
  __builtin_memcpy(place_of(address, sizeof(T)), &value, sizeof(T));
}
inline unsigned counted(unsigned address, unsigned number) {  // and so many more from now on
  const unsigned before = loaded<unsigned>(address);
  return stored(address, before + number), before;
}

void __syncthreads();
void __syncwarp();
void meet(unsigned number, unsigned threads);  // bar.sync
template <unsigned Number, unsigned Threads> void meet() { meet(Number, Threads); }
void arrive_cluster();
void wait_for_cluster();
void let_others();
unsigned shuffled(unsigned mask, unsigned value, unsigned from);  // what lane `from` has
bool __any_sync(unsigned, bool value);
unsigned __ballot_sync(unsigned, bool value);
unsigned __match_any_sync(unsigned, unsigned value);
unsigned __reduce_add_sync(unsigned, unsigned value);
unsigned __reduce_max_sync(unsigned, unsigned value);
unsigned __reduce_min_sync(unsigned, unsigned value);
unsigned turned(unsigned pair);                                  // movmatrix
void matrices(unsigned (&to)[4], unsigned at, bool transposed);  // ldmatrix, with .trans or without
// mma.m16n8k16, as device/mma.cuh draws it.
void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool fp16);
// wgmma of m64 by as many columns as there are sums for, of which it is a warp's part. It happens when a warp waits for
// its group, or when that is closed.
void multiply_group(float* sum, unsigned sums, const unsigned (&a)[4], uint64_t x_at, bool adds, bool fp16);
// The same with A in shared memory, 16 k one after the other.
void multiply_group_at(float* sum, unsigned sums, uint64_t a_at, uint64_t x_at, bool adds, bool fp16);
void close_products();
void wait_for_group(unsigned open);
template <int Open> void wait_for_products() { wait_for_group(Open); }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
void __trap();

template <class T> T __shfl_sync(unsigned mask, T value, unsigned from) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  bits = shuffled(mask, bits, from % 32);
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
// The same among `width` neighbours.
template <class T> T __shfl_sync(unsigned mask, T value, unsigned from, unsigned width) {
  return __shfl_sync(mask, value, threadIdx.x % 32 / width * width + from % width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ other);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  return __shfl_sync(mask, value, threadIdx.x % 32 < by ? threadIdx.x : threadIdx.x - by);
}

// -- Memory -----------------------------------------------------------------------------------------------------------

void check(const void* from, size_t bytes);  // counts it if that is not in `readable`
void check_is_global(const void* place);     // counts it if that is shared memory
template <class T> T __ldg(const T* from) {
  check(from, sizeof(T));
  return *from;
}
template <class T> T settled(const T* from) { return __ldg(from); }
// Copies to shared memory happen when a thread waits for their group.
void copy(unsigned to, unsigned bytes, const void* from, bool exists);
void close_copies();
void wait_for_copies(unsigned open);
template <int Open> void wait_for_groups() { wait_for_copies(Open); }

// Barriers in shared memory, and what arrives there by itself: numbers for a CTA, bulk copies, boxes of arrays by
// their maps, which cuda_on_cpu.py makes, and a thread when its copies have.
void make_barrier(unsigned at, unsigned count);
void arrive_once(unsigned barrier);
void await_bytes(unsigned barrier, unsigned bytes);
void wait_for_phase(unsigned barrier, unsigned parity);
void send(unsigned to, const void* numbers, unsigned bytes, unsigned barrier);
void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier);
void copy_shared(unsigned to, unsigned from, unsigned bytes, unsigned barrier);  // what is there when it happens
void copy_array(unsigned to, const void* map, const unsigned* at, unsigned barrier);
template <class... Places> void copy_box(unsigned to, uint64_t map, Places... places) {  // and the barrier
  const unsigned at[] = {unsigned(places)..., 0, 0, 0, 0};
  const unsigned barrier = at[sizeof...(places) - 1];
  unsigned corner[5];
  for (unsigned i = 0; i < 5; i++) corner[i] = i < sizeof...(places) - 1 ? at[i] : 0;
  copy_array(to, reinterpret_cast<const void*>(map), corner, barrier);
}
void arrive_with_copies(unsigned barrier);
template <int Count> void take_registers() {}
template <int Count> void leave_registers() {}

// -- Numbers ----------------------------------------------------------------------------------------------------------

extern "C" float expf(float), exp2f(float), tanhf(float), erff(float), fmaf(float, float, float);
extern "C" float fmaxf(float, float), fminf(float, float), fabsf(float);
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline float rsqrtf(float value) { return 1 / __builtin_sqrtf(value); }
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | uint64_t(high) << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
// As `prmt`, which knows the upper bit of a selector's nibble.
inline unsigned permuted(unsigned low, unsigned high, unsigned selector) {
  unsigned found = __byte_perm(low, high, selector);
  for (int i = 0; i < 4; i++)
    if (selector >> 4 * i & 8) found = found & ~(255u << 8 * i) | (found >> 8 * i & 128 ? 255u : 0) << 8 * i;
  return found;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((low | uint64_t(high) << 32) >> by % 32);
}
inline float number_of(unsigned bits, bool fp16) {
  if (!fp16) return __uint_as_float(bits << 16);
  const uint16_t half = uint16_t(bits);
  _Float16 value;
  __builtin_memcpy(&value, &half, 2);
  return float(value);
}
inline uint16_t bits_of(float value, bool fp16) {
  if (!fp16) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : uint16_t(bits + 0x7fff + (bits >> 16 & 1) >> 16);
  }
  const _Float16 half = _Float16(value);
  uint16_t bits;
  __builtin_memcpy(&bits, &half, 2);
  return bits;
}
// Of two 16-bit numbers each, divided, minus another number.
inline unsigned minus(unsigned pair, float other, bool fp16, float divisor) {
  const auto one = [&](unsigned bits) {
    return unsigned(bits_of(number_of(bits & 0xffff, fp16) / divisor - other, fp16));
  };
  return one(pair) | one(pair >> 16) << 16;
}
// The products of two pairs of 16-bit numbers.
inline unsigned times(unsigned first, unsigned second, bool fp16) {
  const auto one = [&](unsigned a, unsigned b) {
    return unsigned(bits_of(number_of(a & 0xffff, fp16) * number_of(b & 0xffff, fp16), fp16));
  };
  return one(first, second) | one(first >> 16, second >> 16) << 16;
}

// -- A launch ---------------------------------------------------------------------------------------------------------

struct Range {
  uint64_t begin, end;
};
struct Shape {
  Index grid;
  unsigned cluster, together, threads, shared_bytes;  // CTAs along y; and along x, which wait for each other
};
// Runs `kernel` and returns how often it read what it may not, or ~0 where all threads wait for each other.
unsigned launch(void (*kernel)(const void*), const void* arguments, size_t bytes, const Shape& shape,
                const Range* ranges, unsigned count);
