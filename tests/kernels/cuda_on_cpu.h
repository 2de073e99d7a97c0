// CUDA C++ as C++: what a kernel's source needs to run on a CPU, one CTA after the other in the order of blockIdx. A
// thread runs until it has to wait for others; the last goes first in every other CTA, so that a wait that is missing
// shows, whoever should have waited. Numbers are those of a GPU but for the order of an MMA's sums.
//
// Copies to shared memory happen when a thread waits for them, not before, and shared memory begins full of NaN: so a
// kernel that waits too little computes nonsense here. Reads of what is not in `readable` are counted.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __fdividef(a, b) ((a) / (b))
#define __expf expf

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
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// -- A CTA -------------------------------------------------------------------------------------------------------------

struct Copy {
  unsigned to, bytes;
  const void* from;
  bool exists;
};
struct Warp;
struct Thread {
  ucontext_t state;
  std::vector<unsigned char> stack;
  Index index;
  Warp* warp;
  std::deque<std::vector<Copy>> copies;
};
inline std::deque<Thread*> ready;  // to run, the one that is running in front
inline ucontext_t after_all;
struct Barrier {
  unsigned threads;
  std::vector<Thread*> waiting = {};
  void arrive_and_wait() {
    Thread* self = ready.front();
    if (waiting.size() + 1 == threads) {
      ready.insert(ready.end(), waiting.begin(), waiting.end());
      return waiting.clear();
    }
    waiting.push_back(self);
    ready.pop_front();
    if (ready.empty()) abort();  // all wait for each other
    swapcontext(&self->state, &ready.front()->state);
  }
};
struct Warp {
  Barrier barrier{32};
  unsigned a[32][4], b[32][2], words[32];
};
inline Index gridDim, blockIdx;
inline Barrier* own_cta;
inline unsigned char* memory;  // dynamic shared memory, whose address is 0
#define threadIdx (ready.front()->index)
#define own_warp (ready.front()->warp)
#define copy_groups (ready.front()->copies)

inline size_t __cvta_generic_to_shared(const void* place) { return static_cast<const unsigned char*>(place) - memory; }
inline void __syncthreads() { own_cta->arrive_and_wait(); }
// What lane `from` has.
template <class T> T __shfl_sync(unsigned, T value, unsigned from) {
  std::memcpy(&own_warp->words[threadIdx.x % 32], &value, 4);
  own_warp->barrier.arrive_and_wait();
  T found;
  std::memcpy(&found, &own_warp->words[from % 32], 4);
  own_warp->barrier.arrive_and_wait();
  return found;
}
// The same among `width` neighbours.
template <class T> T __shfl_sync(unsigned mask, T value, unsigned from, unsigned width) {
  return __shfl_sync(mask, value, threadIdx.x % 32 / width * width + from % width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ other);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  for (unsigned step = 1; step < 32; step *= 2) value = std::max(value, __shfl_xor_sync(mask, value, step));
  return value;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) { return ~__reduce_max_sync(mask, ~value); }
inline void __syncwarp() { own_warp->barrier.arrive_and_wait(); }
// movmatrix: of a matrix of eight by eight, whose row lane / 4 a lane has two numbers of, the same of its column.
inline unsigned turned(unsigned pair) {
  const unsigned lane = threadIdx.x % 32, shift = lane / 4 % 2 * 16;
  unsigned found = 0;
  for (unsigned half = 0; half < 2; half++)
    found |= (__shfl_sync(~0u, pair, (lane % 4 * 2 + half) * 4 + lane / 8) >> shift & 0xffff) << 16 * half;
  return found;
}
inline bool __any_sync(unsigned, bool value) {
  bool any = false;
  for (unsigned lane = 0; lane < 32; lane++) any |= __shfl_sync(~0u, unsigned(value), lane) != 0;
  return any;
}
// ldmatrix, with .trans or without: of matrix i lane 8 i + j has the place of row j.
inline void matrices(unsigned (&to)[4], unsigned at, bool transposed) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; i++) {
    to[i] = 0;
    for (unsigned half = 0; half < 2; half++) {
      const unsigned row = transposed ? lane % 4 * 2 + half : lane / 4,
                     column = transposed ? lane / 4 : lane % 4 * 2 + half;
      unsigned from = 0;
      for (unsigned j = 0; j < 8; j++) {
        const unsigned place = __shfl_sync(~0u, at, 8 * i + j);
        if (j == row) from = place;
      }
      uint16_t bits;
      std::memcpy(&bits, memory + from + column * 2, 2);
      to[i] |= unsigned(bits) << 16 * half;
    }
  }
}

// -- Memory ------------------------------------------------------------------------------------------------------------

struct Range {
  uint64_t begin, end;
};
inline std::vector<Range> readable;
inline unsigned wrong_reads;
inline void check(const void* from, size_t bytes) {
  const uint64_t at = reinterpret_cast<uint64_t>(from);
  for (const Range& range : readable)
    if (range.begin <= at && at + bytes <= range.end) return;
  wrong_reads++;
}
template <class T> T __ldg(const T* from) {
  check(from, sizeof(T));
  return *from;
}
template <class T> T settled(const T* from) { return __ldg(from); }
template <int Open> void wait_for_groups() {
  while (copy_groups.size() > Open + 1) {
    for (const Copy& copy : copy_groups.front())
      if (copy.exists) {
        check(copy.from, copy.bytes);
        std::memcpy(memory + copy.to, copy.from, copy.bytes);
      } else {
        std::memset(memory + copy.to, 0, copy.bytes);
      }
    copy_groups.pop_front();
  }
}

// -- Numbers -----------------------------------------------------------------------------------------------------------

template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
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
inline float number_of(unsigned bits, bool fp16) {
  if (!fp16) return __uint_as_float(bits << 16);
  const uint16_t half = uint16_t(bits);
  _Float16 value;
  std::memcpy(&value, &half, 2);
  return float(value);
}
inline uint16_t bits_of(float value, bool fp16) {
  if (!fp16) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fff : uint16_t(bits + 0x7fff + (bits >> 16 & 1) >> 16);
  }
  const _Float16 half = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
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
// mma.m16n8k16, as device/mma.cuh draws it.
inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool fp16) {
  const unsigned lane = threadIdx.x % 32;
  std::memcpy(own_warp->a[lane], a, 16);
  own_warp->b[lane][0] = b0, own_warp->b[lane][1] = b1;
  own_warp->barrier.arrive_and_wait();
  for (unsigned i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double total = sum[i];
    for (unsigned k = 0; k < 16; k++) {
      const unsigned member = k % 8 / 2, shift = 16 * (k % 2);
      const unsigned w = own_warp->a[row % 8 * 4 + member][row / 8 + k / 8 * 2] >> shift & 0xffff;
      const unsigned x = own_warp->b[column * 4 + member][k / 8] >> shift & 0xffff;
      total += double(number_of(w, fp16)) * number_of(x, fp16);
    }
    sum[i] = float(total);
  }
  own_warp->barrier.arrive_and_wait();
}

// -- A launch ----------------------------------------------------------------------------------------------------------

// What a thread does, from its beginning to the next one's turn.
template <class Arguments> struct Body {
  static inline void (*kernel)(Arguments);
  static inline const Arguments* arguments;
  static void run() {
    kernel(*arguments);
    ready.pop_front();
    setcontext(ready.empty() ? &after_all : &ready.front()->state);
  }
};

// Runs `kernel` and returns how often it read what it may not.
template <class Arguments>
unsigned launch(void (*kernel)(Arguments), const void* arguments, size_t bytes, unsigned ctas, unsigned threads,
                unsigned shared_bytes, const Range* ranges, unsigned count) {
  alignas(64) Arguments a;
  if (sizeof a != bytes) return ~0u;
  std::memcpy(static_cast<void*>(&a), arguments, bytes);
  Body<Arguments>::kernel = kernel, Body<Arguments>::arguments = &a;
  readable.assign(ranges, ranges + count);
  wrong_reads = 0;
  gridDim = {ctas, 1, 1};
  std::vector<Thread> all(threads);
  for (unsigned cta = 0; cta < ctas; cta++) {
    std::vector<unsigned char> room(shared_bytes + 1024, 0xff);
    memory = room.data() + (1024 - reinterpret_cast<uint64_t>(room.data()) % 1024) % 1024;
    blockIdx = {cta, 0, 0};
    Barrier barrier{threads};
    own_cta = &barrier;
    std::vector<Warp> warps(threads / 32);
    for (unsigned place = 0; place < threads; place++) {
      const unsigned number = cta % 2 ? threads - 1 - place : place;
      Thread& one = all[number];
      one.index = {number, 0, 0}, one.warp = &warps[number / 32];
      one.copies = {{}};
      one.stack.resize(1 << 17);
      getcontext(&one.state);
      one.state.uc_stack.ss_sp = one.stack.data(), one.state.uc_stack.ss_size = one.stack.size();
      one.state.uc_link = nullptr;
      makecontext(&one.state, Body<Arguments>::run, 0);
      ready.push_back(&one);
    }
    swapcontext(&after_all, &ready.front()->state);
  }
  return wrong_reads;
}
