// Runs a kernel on a CPU, one CTA after the other in the order of blockIdx. A thread runs until it has to wait for
// others; the last goes first in every other CTA, so that a wait that is missing shows, whoever should have waited.
//
// Copies to shared memory happen when a thread waits for them, not before, and shared memory begins full of NaN: so a
// kernel that waits too little computes nonsense here. Reads of what is not in `readable` are counted.

#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

struct Copy {
  unsigned to, bytes;
  const void* from;
  bool exists;
};
struct Thread;
struct Barrier {
  unsigned threads;
  std::vector<Thread*> waiting = {};
  template <class Last> void wait(Last last);
};
// What its lanes bring to an operation of all, and what they take from it. Whoever comes last computes that for all.
struct Warp {
  Barrier barrier{32};
  unsigned given[32][6], taken[32][4];
  float sums[32][4];
};
struct Thread {
  static constexpr size_t STACK = 1 << 17;
  ucontext_t begin;
  jmp_buf place;  // where it waits: a system call fewer than a context
  bool begun;
  std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK]};
  Index index;
  Warp* warp;
  std::deque<std::vector<Copy>> copies;
};

Index gridDim, blockIdx, threadIdx;
unsigned char* memory;
static std::deque<Thread*> ready;  // to run, the one that is running in front
static ucontext_t after_all;
static Barrier* own_cta;
static std::vector<Range> readable;
static unsigned wrong_reads;
static void (*running)(const void*);
static const void* told;

// The thread in front, from where it waits or from its beginning.
static void run_first() {
  Thread& next = *ready.front();
  threadIdx = next.index;
  if (next.begun) _longjmp(next.place, 1);
  next.begun = true;
  setcontext(&next.begin);
}

template <class Last> void Barrier::wait(Last last) {
  if (waiting.size() + 1 == threads) {
    last();
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    return waiting.clear();
  }
  Thread* self = ready.front();
  waiting.push_back(self);
  ready.pop_front();
  if (ready.empty()) abort();  // all wait for each other
  if (!_setjmp(self->place)) run_first();
}

void __syncthreads() {
  own_cta->wait([] {});
}
void __syncwarp() {
  ready.front()->warp->barrier.wait([] {});
}

// All lanes give a word each; `all` makes of them what they take.
template <class All> static unsigned exchanged(unsigned value, All all) {
  Warp* warp = ready.front()->warp;
  const unsigned lane = threadIdx.x % 32;
  warp->given[lane][0] = value;
  warp->barrier.wait([&] { all(*warp); });
  return warp->taken[lane][0];
}
unsigned shuffled(unsigned value, unsigned from) {
  Warp* warp = ready.front()->warp;
  exchanged(value, [](Warp& all) {
    for (unsigned lane = 0; lane < 32; lane++) all.taken[lane][0] = all.given[lane][0];
  });
  return warp->taken[from][0];
}
template <class Two> static unsigned reduced(unsigned value, Two two) {
  return exchanged(value, [&](Warp& all) {
    unsigned found = all.given[0][0];
    for (unsigned lane = 1; lane < 32; lane++) found = two(found, all.given[lane][0]);
    for (unsigned lane = 0; lane < 32; lane++) all.taken[lane][0] = found;
  });
}
bool __any_sync(unsigned, bool value) {
  return reduced(value, [](unsigned a, unsigned b) { return a | b; });
}
unsigned __reduce_max_sync(unsigned, unsigned value) {
  return reduced(value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
unsigned __reduce_min_sync(unsigned, unsigned value) {
  return reduced(value, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
// Of a matrix of eight by eight, whose row lane / 4 a lane has two numbers of, the same of its column.
unsigned turned(unsigned pair) {
  return exchanged(pair, [](Warp& all) {
    for (unsigned lane = 0; lane < 32; lane++) {
      const unsigned shift = lane / 4 % 2 * 16;
      all.taken[lane][0] = 0;
      for (unsigned half = 0; half < 2; half++)
        all.taken[lane][0] |= (all.given[(lane % 4 * 2 + half) * 4 + lane / 8][0] >> shift & 0xffff) << 16 * half;
    }
  });
}
// Of matrix i lane 8 i + j has the place of row j.
void matrices(unsigned (&to)[4], unsigned at, bool transposed) {
  Warp* warp = ready.front()->warp;
  const unsigned own = threadIdx.x % 32;
  exchanged(at, [=](Warp& all) {
    for (unsigned lane = 0; lane < 32; lane++)
      for (unsigned i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (unsigned half = 0; half < 2; half++) {
          const unsigned row = transposed ? lane % 4 * 2 + half : lane / 4;
          const unsigned column = transposed ? lane / 4 : lane % 4 * 2 + half;
          std::memcpy(&pair[half], memory + all.given[8 * i + row][0] + column * 2, 2);
        }
        all.taken[lane][i] = pair[0] | unsigned(pair[1]) << 16;
      }
  });
  std::memcpy(to, warp->taken[own], 16);
}
void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool fp16) {
  Warp* warp = ready.front()->warp;
  const unsigned own = threadIdx.x % 32;
  std::memcpy(warp->given[own], a, 16);
  warp->given[own][4] = b0, warp->given[own][5] = b1;
  std::memcpy(warp->sums[own], sum, 16);
  warp->barrier.wait([=] {
    double w[16][16], x[16][8];  // w: by row and k. x: by k and column
    for (unsigned lane = 0; lane < 32; lane++)
      for (unsigned half = 0; half < 2; half++) {
        const unsigned* given = warp->given[lane];
        for (unsigned i = 0; i < 4; i++)
          w[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + half] = number_of(given[i] >> 16 * half & 0xffff, fp16);
        for (unsigned i = 0; i < 2; i++)
          x[i * 8 + lane % 4 * 2 + half][lane / 4] = number_of(given[4 + i] >> 16 * half & 0xffff, fp16);
      }
    for (unsigned row = 0; row < 16; row++) {
      double totals[8];
      const auto place = [&](unsigned column) {
        return &warp->sums[row % 8 * 4 + column / 2][row / 8 * 2 + column % 2];
      };
      for (unsigned column = 0; column < 8; column++) totals[column] = *place(column);
      for (unsigned k = 0; k < 16; k++)
        for (unsigned column = 0; column < 8; column++) totals[column] += w[row][k] * x[k][column];
      for (unsigned column = 0; column < 8; column++) *place(column) = float(totals[column]);
    }
  });
  std::memcpy(sum, warp->sums[own], 16);
}

void check(const void* from, size_t bytes) {
  const uint64_t at = reinterpret_cast<uint64_t>(from);
  for (const Range& range : readable)
    if (range.begin <= at && at + bytes <= range.end) return;
  wrong_reads++;
}
void copy(unsigned to, unsigned bytes, const void* from, bool exists) {
  ready.front()->copies.back().push_back({to, bytes, from, exists});
}
void close_copies() { ready.front()->copies.emplace_back(); }
void wait_for_copies(unsigned open) {
  auto& copies = ready.front()->copies;
  while (copies.size() > open + 1) {
    for (const Copy& one : copies.front())
      if (one.exists) {
        check(one.from, one.bytes);
        std::memcpy(memory + one.to, one.from, one.bytes);
      } else {
        std::memset(memory + one.to, 0, one.bytes);
      }
    copies.pop_front();
  }
}

// What a thread does, from its beginning to the next one's turn.
static void run() {
  running(told);
  ready.pop_front();
  if (ready.empty()) setcontext(&after_all);
  run_first();
}

unsigned launch(void (*kernel)(const void*), const void* arguments, size_t bytes, unsigned ctas, unsigned threads,
                unsigned shared_bytes, const Range* ranges, unsigned count) {
  std::vector<unsigned char> aligned(bytes + 64);
  void* place = aligned.data() + (64 - reinterpret_cast<uint64_t>(aligned.data()) % 64) % 64;
  std::memcpy(place, arguments, bytes);
  running = kernel, told = place;
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
    for (unsigned i = 0; i < threads; i++) {
      const unsigned number = cta % 2 ? threads - 1 - i : i;
      Thread& one = all[number];
      one.index = {number, 0, 0}, one.warp = &warps[number / 32], one.begun = false;
      one.copies = {{}};
      getcontext(&one.begin);
      one.begin.uc_stack.ss_sp = one.stack.get(), one.begin.uc_stack.ss_size = Thread::STACK;
      one.begin.uc_link = nullptr;
      makecontext(&one.begin, run, 0);
      ready.push_back(&one);
    }
    threadIdx = ready.front()->index, ready.front()->begun = true;
    swapcontext(&after_all, &ready.front()->begin);
  }
  return wrong_reads;
}
