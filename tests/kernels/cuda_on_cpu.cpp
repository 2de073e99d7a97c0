// Runs a kernel on a CPU, one CTA after the other in the order of blockIdx; those of a cluster together, and those that
// wait for each other. A thread runs until it has to wait for others. In every other turn the last thread goes first,
// and the CTAs of a turn begin as late as they can, so that a wait that is missing shows, whoever should have waited.
//
// What a thread copies to shared memory by itself happens when it waits for it, not before. Copies that end at a
// barrier happen as late as they can, when no thread can go on without one, and in any order; in every other pair of
// CTAs at once, over what may still be read. Shared memory begins full of NaN. So a kernel that waits too little
// computes nonsense here. Reads of what is not in `readable`, and uses of shared memory that is not there, are counted.

#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

struct Copy {
  unsigned to, bytes;
  const void* from;
  bool exists, from_memory = true;
};
struct Product {  // a lane's part of it
  float* sum;
  unsigned sums, a[4];
  uint64_t x_at, a_at;  // a_at: 0 if A is in registers
  bool adds, fp16;
};
struct Thread;
struct Barrier {
  unsigned threads;
  std::vector<Thread*> waiting = {};
  template <class Last> void wait(Last last);
};
struct Some {  // lanes that shuffle among themselves
  Barrier barrier;
  unsigned given[32], taken[32];
};
// What its lanes bring to an operation of all, and what they take from it. Whoever comes last computes that for all.
struct Warp {
  Barrier barrier{32};
  unsigned given[32][6], taken[32][4];
  float sums[32][4];
  Thread* lanes[32];
  std::map<unsigned, Some> some = {};  // by mask
};
// A barrier in shared memory, all of whose state is there.
struct Phase {
  unsigned parity : 1, count : 15, pending : 16;  // arrivals of each phase, and of this one that are missing
  int bytes;                                      // that are missing
};
static_assert(sizeof(Phase) == 8);
struct Cta {
  Index index;
  unsigned alive;  // threads
  std::vector<unsigned char> room;
  unsigned char* memory;  // in it, at a multiple of 1024
  Barrier all;
  std::vector<Warp> warps;
  std::map<unsigned, Barrier> named = {};
  std::map<unsigned, std::vector<Thread*>> waiting = {};  // for a phase of the barrier at an address
};
struct Thread {
  static constexpr size_t STACK = 1 << 17;
  ucontext_t begin;
  jmp_buf place;  // where it waits: a system call fewer than a context
  bool begun;
  unsigned meetings;  // of its cluster that it has waited for
  std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK]};
  Index index;
  Cta* cta;
  Warp* warp;
  std::deque<std::vector<Copy>> copies;
  std::deque<std::vector<Product>> products;
};
// Pieces of memory on their way to shared memory, and what they do to a barrier when they are there.
struct Flight {
  std::vector<std::pair<unsigned, std::vector<unsigned char>>> numbers;  // which a thread sent
  std::vector<Copy> copies;
  unsigned barrier, bytes, arrivals;
};
struct Map {  // of an array of bytes: see cuda_on_cpu.py
  uint64_t address, sizes[5], strides[4];
  unsigned box[5], swizzle;
};

static constexpr unsigned BASE = 1024;

Index gridDim, blockIdx, threadIdx;
unsigned char* memory;
static std::deque<Thread*> ready;  // to run, the one that is running in front
static std::vector<Flight> flying;
static ucontext_t after_all;
static std::vector<Cta> cluster;
// How often all threads of the cluster have arrived, how many have since, and who waits until all have.
static struct {
  unsigned threads, phase, arrived;
  std::vector<Thread*> waiting;
} own_cluster;
static std::vector<Range> readable;
static std::vector<std::vector<Thread*>> later;  // threads of CTAs that have not begun
static unsigned wrong, shared_bytes, chance, alive, in_vain, together;
static bool at_once, hurries;  // hurries: a warp that has met goes on before all others, and is far ahead of some
static void (*running)(const void*);
static const void* told;

static void land(Flight flight);

// Something lands, or else another CTA begins. True if there was something.
static bool something_happens() {
  if (flying.empty() && later.empty()) return false;
  if (flying.empty()) {
    ready.insert(ready.end(), later.back().begin(), later.back().end());
    later.pop_back();
    return true;
  }
  chance = chance * 1664525 + 1013904223;
  const auto next = flying.begin() + (chance >> 16) % flying.size();
  Flight flight = std::move(*next);
  flying.erase(next);
  land(std::move(flight));
  return true;
}
// The thread in front, from where it waits or from its beginning. Where there is none, something happens first.
static void run_first() {
  while (ready.empty() && something_happens()) continue;
  if (ready.empty()) setcontext(&after_all);  // all have ended, or wait for each other
  Thread& next = *ready.front();
  threadIdx = next.index, blockIdx = next.cta->index, memory = next.cta->memory;
  if (next.begun) _longjmp(next.place, 1);
  next.begun = true;
  setcontext(&next.begin);
}
static void wait_in(std::vector<Thread*>& waiting) {
  Thread* self = ready.front();
  waiting.push_back(self);
  ready.pop_front();
  if (!_setjmp(self->place)) run_first();
}
static void wake(std::vector<Thread*>& waiting) {
  ready.insert(ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

template <class Last> void Barrier::wait(Last last) {
  if (waiting.size() + 1 < threads) return wait_in(waiting);
  last();
  if (!hurries || threads != 32) return wake(waiting);
  ready.insert(ready.begin() + 1, waiting.begin(), waiting.end());
  waiting.clear();
}

void __syncthreads() {
  ready.front()->cta->all.wait([] {});
}
void __syncwarp() {
  ready.front()->warp->barrier.wait([] {});
}
void meet(unsigned number, unsigned threads) {
  Barrier& barrier = ready.front()->cta->named[number];
  barrier.threads = threads;
  barrier.wait([] {});
}
void arrive_cluster() {
  if (++own_cluster.arrived < own_cluster.threads) return;
  own_cluster.arrived = 0, own_cluster.phase++;
  wake(own_cluster.waiting);
}
void wait_for_cluster() {
  if (own_cluster.phase == ready.front()->meetings++) wait_in(own_cluster.waiting);
}
void __trap() { wrong++; }

// Other threads go first, and now and then something happens: whoever asks for numbers from other CTAs does so again
// and again, until they are there.
void let_others() {
  Thread* self = ready.front();
  if (++in_vain > 1 << 22) setcontext(&after_all);  // they never are
  if (in_vain % 256 == 0) something_happens();
  ready.push_back(self);
  ready.pop_front();
  if (!_setjmp(self->place)) run_first();
}

// All lanes give a word each; `all` makes of them what they take.
template <class All> static unsigned exchanged(unsigned value, All all) {
  Warp* warp = ready.front()->warp;
  const unsigned lane = threadIdx.x % 32;
  warp->given[lane][0] = value;
  warp->barrier.wait([&] { all(*warp); });
  return warp->taken[lane][0];
}
unsigned shuffled(unsigned mask, unsigned value, unsigned from) {
  const unsigned lane = threadIdx.x % 32;
  Some& some = ready.front()->warp->some[mask];
  if (!(mask >> lane & mask >> from & 1)) wrong++;
  some.barrier.threads = __builtin_popcount(mask);
  some.given[lane] = value;
  some.barrier.wait([&] { std::copy_n(some.given, 32, some.taken); });
  return some.taken[from];
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
unsigned __ballot_sync(unsigned, bool value) {
  return reduced(unsigned(value) << threadIdx.x % 32, [](unsigned a, unsigned b) { return a | b; });
}
unsigned __match_any_sync(unsigned, unsigned value) {
  return exchanged(value, [](Warp& all) {
    for (unsigned lane = 0; lane < 32; lane++) {
      all.taken[lane][0] = 0;
      for (unsigned other = 0; other < 32; other++)
        all.taken[lane][0] |= unsigned(all.given[other][0] == all.given[lane][0]) << other;
    }
  });
}
unsigned __reduce_add_sync(unsigned, unsigned value) {
  return reduced(value, [](unsigned a, unsigned b) { return a + b; });
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
          pair[half] = loaded<uint16_t>(all.given[8 * i + row][0] + column * 2);
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

// -- Products of a warpgroup ------------------------------------------------------------------------------------------

void multiply_group(float* sum, unsigned sums, const unsigned (&a)[4], uint64_t x_at, bool adds, bool fp16) {
  ready.front()->products.back().push_back({sum, sums, {a[0], a[1], a[2], a[3]}, x_at, 0, adds, fp16});
}
void multiply_group_at(float* sum, unsigned sums, uint64_t a_at, uint64_t x_at, bool adds, bool fp16) {
  ready.front()->products.back().push_back({sum, sums, {}, x_at, a_at, adds, fp16});
}
// What a descriptor says: eight rows of 128 bytes after eight others, their pieces of 16 bytes swizzled.
static unsigned begin_of(uint64_t descriptor) {
  const unsigned begin = unsigned(descriptor & 0x3fff) * 16;
  if (begin % 32 || (begin / 128 & 7) || descriptor >> 32 != (1u << 30 | 1024 / 16)) wrong++;
  return begin;
}
// All lanes have a part of each.
static void multiply(Warp& warp, unsigned number) {
  const Product& first = warp.lanes[0]->products.front()[number];
  const unsigned columns = 2 * first.sums, begin = begin_of(first.x_at);
  const unsigned cta = unsigned(warp.lanes[0]->cta - cluster.data()) << 24;
  if (columns % 8) wrong++;
  float w[16][16];
  for (unsigned lane = 0; lane < 32; lane++) {
    const Product& own = warp.lanes[lane]->products.front()[number];
    if (own.x_at != first.x_at || own.a_at != first.a_at || own.sums != first.sums || own.adds != first.adds) wrong++;
    for (unsigned i = 0; i < 4; i++)
      for (unsigned half = 0; half < 2; half++)
        w[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + half] =
            number_of(own.a[i] >> 16 * half & 0xffff, first.fp16);
  }
  if (first.a_at) {  // of 64 rows side by side, a warp's 16
    const unsigned from = begin_of(first.a_at), own = unsigned(&warp - warp.lanes[0]->cta->warps.data()) % 4 * 16;
    if (from % 1024) wrong++;
    for (unsigned k = 0; k < 16; k++)
      for (unsigned row = 0; row < 16; row++) {
        const unsigned at = from + k * 128 + (own + row) * 2;
        w[row][k] = number_of(loaded<uint16_t>(cta | at ^ (at >> 3 & 0x70)), first.fp16);
      }
  }
  for (unsigned column = 0; column < columns; column++) {
    float x[16];
    for (unsigned k = 0; k < 16; k++) {
      const unsigned at = begin + column / 8 * 1024 + column % 8 * 128 + k * 2;
      x[k] = number_of(loaded<uint16_t>(cta | at ^ (at >> 3 & 0x70)), first.fp16);
    }
    for (unsigned row = 0; row < 16; row++) {
      const Product& own = warp.lanes[row % 8 * 4 + column % 8 / 2]->products.front()[number];
      float& sum = own.sum[column / 8 * 4 + row / 8 * 2 + column % 2];
      double total = first.adds ? sum : 0;
      for (unsigned k = 0; k < 16; k++) total += double(w[row][k]) * x[k];
      sum = float(total);
    }
  }
}
void wait_for_group(unsigned open) {
  Warp* warp = ready.front()->warp;
  warp->barrier.wait([&] {
    while (warp->lanes[0]->products.size() > open + 1) {
      for (unsigned i = 0; i < warp->lanes[0]->products.front().size(); i++) multiply(*warp, i);
      for (Thread* lane : warp->lanes) lane->products.pop_front();
    }
  });
}
void close_products() {
  ready.front()->products.emplace_back();
  if (at_once) wait_for_group(0);
}

// -- Memory -----------------------------------------------------------------------------------------------------------

unsigned address_of(const void* place) {
  const Cta* own = ready.front()->cta;
  const size_t inside = static_cast<const unsigned char*>(place) - own->memory;
  return unsigned(inside) + BASE | unsigned(own - cluster.data()) << 24;
}
unsigned address_of_rank(unsigned address, unsigned rank) {
  const unsigned own = unsigned(ready.front()->cta - cluster.data());
  return address & 0xffffff | (rank * together + own % together) << 24;
}
unsigned char* place_of(unsigned address, size_t bytes) {
  static std::vector<unsigned char> nowhere;
  const unsigned number = address >> 24, inside = (address & 0xffffff) - BASE;
  if (number < cluster.size() && cluster[number].alive && inside <= shared_bytes && inside + bytes <= shared_bytes)
    return cluster[number].memory + inside;
  wrong++;
  nowhere.resize(max(nowhere.size(), bytes));
  return nowhere.data();
}
void check_is_global(const void* place) {
  const auto* at = static_cast<const unsigned char*>(place);
  if (at >= memory && at < memory + shared_bytes) wrong++;
}
void check(const void* from, size_t bytes) {
  const uint64_t at = reinterpret_cast<uint64_t>(from);
  for (const Range& range : readable)
    if (range.begin <= at && at + bytes <= range.end) return;
  wrong++;
}
static void finish(const Copy& one) {
  if (one.exists) {
    if (one.from_memory) check(one.from, one.bytes);
    std::memcpy(place_of(one.to, one.bytes), one.from, one.bytes);
  } else {
    std::memset(place_of(one.to, one.bytes), 0, one.bytes);
  }
}
void copy(unsigned to, unsigned bytes, const void* from, bool exists) {
  ready.front()->copies.back().push_back({to, bytes, from, exists});
}
void close_copies() { ready.front()->copies.emplace_back(); }
void wait_for_copies(unsigned open) {
  auto& copies = ready.front()->copies;
  for (; copies.size() > open + 1; copies.pop_front())
    for (const Copy& one : copies.front()) finish(one);
}

// -- Barriers in shared memory ----------------------------------------------------------------------------------------

void make_barrier(unsigned at, unsigned count) { stored(at, Phase{0, count, count, 0}); }
static void change(unsigned at, unsigned arrivals, int bytes) {
  Phase phase = loaded<Phase>(at);
  if (arrivals > phase.pending || at % 8) wrong++;
  phase.pending -= arrivals, phase.bytes += bytes;
  const bool over = phase.pending == 0 && phase.bytes == 0;
  if (over) phase.parity ^= 1, phase.pending = phase.count;
  stored(at, phase);
  if (over && at >> 24 < cluster.size()) wake(cluster[at >> 24].waiting[at & 0xffffff]);
}
void arrive_once(unsigned barrier) { change(barrier, 1, 0); }
void await_bytes(unsigned barrier, unsigned bytes) { change(barrier, 1, int(bytes)); }
void wait_for_phase(unsigned barrier, unsigned parity) {
  while (loaded<Phase>(barrier).parity == parity) wait_in(ready.front()->cta->waiting[barrier & 0xffffff]);
}
static void land(Flight flight) {
  for (auto& [to, bytes] : flight.numbers) std::memcpy(place_of(to, bytes.size()), bytes.data(), bytes.size());
  for (const Copy& one : flight.copies) finish(one);
  change(flight.barrier, flight.arrivals, -int(flight.bytes));
}
static void start(Flight flight) {
  if (at_once) land(std::move(flight));
  else flying.push_back(std::move(flight));
}
void send(unsigned to, const void* numbers, unsigned bytes, unsigned barrier) {
  const auto* first = static_cast<const unsigned char*>(numbers);
  start({{{to, {first, first + bytes}}}, {}, barrier, bytes, 0});
}
void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  if (to % 16 || bytes % 16 || bytes == 0 || reinterpret_cast<uint64_t>(from) % 16) wrong++;
  start({{}, {{to, bytes, from, true}}, barrier, bytes, 0});
}
void copy_shared(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  if (to % 16 || from % 16 || bytes % 16 || bytes == 0) wrong++;
  start({{}, {{to, bytes, place_of(from, bytes), true, false}}, barrier, bytes, 0});
}
// The box at `at`. Its pieces of 16 bytes are where the swizzle of its lines has them; zeros are beyond the array.
void copy_array(unsigned to, const void* told, const unsigned* at, unsigned barrier) {
  Map map;
  std::memcpy(&map, told, sizeof map);
  if (to % 128 || at[0] % 16) wrong++;
  Flight flight{{}, {}, barrier, 1, 0};
  for (unsigned side : map.box) flight.bytes *= side;
  for (unsigned i = 0; i < flight.bytes; i += 16) {
    uint64_t from = map.address;
    unsigned rest = i, exist = 16;
    for (unsigned d = 0; d < 5; rest /= map.box[d], d++) {
      const uint64_t place = at[d] + rest % map.box[d];
      from += place * (d ? map.strides[d - 1] : 1);
      if (place >= map.sizes[d]) exist = 0;
      else if (d == 0) exist = unsigned(min<uint64_t>(16, map.sizes[0] - place));
    }
    const unsigned piece = to + i ^ (to + i) >> 3 & ((1 << map.swizzle) - 1) << 4;
    if (exist > 0) flight.copies.push_back({piece, exist, reinterpret_cast<const void*>(from), true});
    if (exist < 16) flight.copies.push_back({piece + exist, 16 - exist, nullptr, false});
  }
  start(std::move(flight));
}
void arrive_with_copies(unsigned barrier) {
  Flight flight{{}, {}, barrier, 0, 1};
  for (auto& group : ready.front()->copies) flight.copies.insert(flight.copies.end(), group.begin(), group.end());
  ready.front()->copies = {{}};
  start(std::move(flight));
}

// -- A launch ---------------------------------------------------------------------------------------------------------

// What a thread does, from its beginning to the next one's turn.
static void run() {
  running(told);
  alive--, ready.front()->cta->alive--;
  ready.pop_front();
  run_first();
}

static void begin(Thread& one, Cta& cta, unsigned number) {
  one.index = {number, 0, 0}, one.cta = &cta, one.warp = &cta.warps[number / 32], one.begun = false, one.meetings = 0;
  one.copies = {{}}, one.products = {{}};
  one.warp->lanes[number % 32] = &one;
  getcontext(&one.begin);
  one.begin.uc_stack.ss_sp = one.stack.get(), one.begin.uc_stack.ss_size = Thread::STACK;
  one.begin.uc_link = nullptr;
  makecontext(&one.begin, run, 0);
}

unsigned launch(void (*kernel)(const void*), const void* arguments, size_t bytes, const Shape& shape,
                const Range* ranges, unsigned count) {
  std::vector<unsigned char> aligned(bytes + 64);
  void* place = aligned.data() + (64 - reinterpret_cast<uint64_t>(aligned.data()) % 64) % 64;
  std::memcpy(place, arguments, bytes);
  running = kernel, told = place;
  readable.assign(ranges, ranges + count);
  wrong = 0, shared_bytes = shape.shared_bytes, alive = 0;
  gridDim = shape.grid, together = shape.together;
  const unsigned threads = shape.threads, along_y = gridDim.y / shape.cluster,
                 at_a_time = shape.cluster * shape.together;
  const unsigned along_x = gridDim.x / shape.together;
  std::vector<Thread> all(threads * at_a_time);
  for (unsigned number = 0; number < along_x * along_y * gridDim.z && alive == 0; number++) {
    own_cluster = {alive = threads * at_a_time}, in_vain = 0;
    at_once = number / 2 % 2, hurries = number % 2;
    flying.clear(), ready.clear(), later.clear();
    cluster = std::vector<Cta>(at_a_time);
    for (unsigned rank = 0; rank < at_a_time; rank++) {
      Cta& cta = cluster[rank];
      cta.index = {number % along_x * shape.together + rank % shape.together,
                   number / along_x % along_y * shape.cluster + rank / shape.together, number / along_x / along_y};
      cta.room.assign(shared_bytes + 1024, 0xff);
      cta.memory = cta.room.data() + (1024 - reinterpret_cast<uint64_t>(cta.room.data()) % 1024) % 1024;
      cta.all = {cta.alive = threads}, cta.warps.resize(threads / 32);
      std::vector<Thread*> own;
      for (unsigned i = 0; i < threads; i++) {
        own.push_back(&all[rank * threads + i]);
        begin(*own.back(), cta, number % 2 ? threads - 1 - i : i);
      }
      later.push_back(own);
    }
    for (; !later.empty() && (number % 2 == 0 || ready.empty()); later.pop_back())
      ready.insert(ready.end(), later.back().begin(), later.back().end());
    Thread& first = *ready.front();
    threadIdx = first.index, blockIdx = first.cta->index, memory = first.cta->memory, first.begun = true;
    swapcontext(&after_all, &first.begin);
  }
  return alive ? ~0u : wrong;
}
