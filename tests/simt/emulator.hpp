// Runs CUDA kernels on the host, one fiber per thread, to find wrong results, missing barriers and
// bad addresses without a GPU. Include it before any .cuh of the library: it takes the place of
// cuda/ptx.cuh.
//
// What it checks beyond results:
// - shared memory has the exact size asked for and starts as NaN bytes; addresses of asynchronous
//   copies and of ldmatrix are checked for range and alignment, others by AddressSanitizer;
// - a thread runs until it must wait, warps and lanes forward, reversed or shuffled, so that what a
//   missing barrier allows to go wrong does go wrong in one of the orders;
// - an asynchronous copy lands at once or, in the other mode, only when its thread waits for its
//   group: data read before the wait, or overwritten too early, shows;
// - a barrier or a warp operation that not all threads reach is reported, copies left under way
// too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "chunkattn/base/config.hpp"
#include "chunkattn/base/element.hpp"
#include "simt/fiber.hpp"

#define CHUNKATTN_PTX_PROVIDED 1
#define CHUNKATTN_DEVICE inline
#define CHUNKATTN_KERNEL inline void
#define CHUNKATTN_LAUNCH_BOUNDS(threads, blocks)
#define CHUNKATTN_UNROLL
#define CHUNKATTN_UNROLL_BY(n)

namespace simt {

enum class Order { forward, reversed, shuffled };
enum class Copies { at_issue, at_wait };

/// How blocks, warps and lanes take turns.
struct Schedule {
  Order order = Order::forward;
  Copies copies = Copies::at_issue;
  std::uint64_t seed = 1;
};

inline Schedule& current_schedule() {
  static Schedule schedule;
  return schedule;
}

/// Counts what kernels did, for tests that must know that something happened.
struct Statistics {
  std::uint64_t mma = 0, cp_async = 0, barriers = 0, blocks = 0;
};
inline Statistics& statistics() {
  static Statistics counts;
  return counts;
}

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Dim {
  int block = 0, grid = 0, threads = 0;
};

/// What one lane brings to a warp operation and takes from it.
struct LaneData {
  alignas(16) unsigned char bytes[48];
};

struct PendingCopy {
  unsigned char* target;
  unsigned char data[16];
  const void* source;
};

class Block;

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  int index = 0;
  bool done = false;
  std::uint64_t waits_for_barrier = 0;  // generation that must have passed
  std::uint64_t waits_for_warp = 0;
  std::vector<std::vector<PendingCopy>> groups;  // committed, oldest first
  std::vector<PendingCopy> open;                 // issued, not yet committed
};

struct Warp {
  int arrived = 0;
  std::uint64_t generation = 0;  // completed operations
  const char* operation = nullptr;
  LaneData in[32], out[32];
};

inline Thread*& current_thread() {
  static Thread* thread = nullptr;
  return thread;
}

/// One block under way: its threads, shared memory and the turn-taking.
class Block {
 public:
  Block(Dim dim, std::size_t shared_bytes, const std::function<void()>& body, Schedule schedule,
        std::vector<std::unique_ptr<FiberStack>>& stacks)
      : dim_(dim), body_(body), schedule_(schedule), random_(schedule.seed) {
    if (dim.threads % 32 != 0) throw Fault("simt: blocks are whole warps");
    shared_size_ = shared_bytes;
    void* memory = nullptr;  // exactly as large as asked for: AddressSanitizer guards both ends
    if (posix_memalign(&memory, 128, std::max<std::size_t>(shared_bytes, 1)) != 0)
      throw Fault("simt: out of memory");
    shared_.reset(static_cast<unsigned char*>(memory));
    std::memset(memory, 0xff, shared_bytes);
    warps_.resize(static_cast<std::size_t>(dim.threads / 32));
    threads_.resize(static_cast<std::size_t>(dim.threads));
    while (stacks.size() < threads_.size()) stacks.push_back(std::make_unique<FiberStack>());
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      threads_[i].block = this;
      threads_[i].index = static_cast<int>(i);
      threads_[i].fiber.start(*stacks[i], &Block::entry, &threads_[i]);
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void run() {
    std::vector<int> order = turn_order(dim_.threads / 32);
    while (true) {
      bool moved = false, all_done = true;
      if (schedule_.order == Order::shuffled) order = turn_order(dim_.threads / 32);
      for (const int warp : order) moved |= run_warp(warp);
      if (!fault_.empty()) throw Fault(fault_);
      for (const Thread& thread : threads_) all_done &= thread.done;
      if (all_done) break;
      if (!moved) throw Fault(describe_stall());
    }
    for (const Thread& thread : threads_)
      if (!thread.open.empty() || !thread.groups.empty())
        throw Fault("simt: thread " + std::to_string(thread.index) +
                    " left with asynchronous copies under way");
  }

  Dim dim() const { return dim_; }
  unsigned char* shared() { return shared_.get(); }

  unsigned char* shared_at(std::uint32_t offset, int bytes, const char* what) {
    if (offset % static_cast<std::uint32_t>(bytes) != 0 ||
        offset + static_cast<std::uint32_t>(bytes) > shared_size_)
      fail(std::string("simt: ") + what + " at shared offset " + std::to_string(offset) + " of " +
           std::to_string(shared_size_) + ": out of range or misaligned");
    return shared_.get() + offset;
  }
  std::uint32_t offset_of(const void* pointer) const {
    return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) - shared_.get());
  }

  void barrier() {
    Thread& self = *current_thread();
    ++statistics().barriers;
    self.waits_for_barrier = barrier_generation_ + 1;
    if (++barrier_arrived_ == dim_.threads) {
      barrier_arrived_ = 0;
      ++barrier_generation_;
    }
    while (barrier_generation_ < self.waits_for_barrier) self.fiber.yield();
    self.waits_for_barrier = 0;
  }

  /// All 32 lanes bring `in`; the last to arrive computes every lane's result.
  template <class In, class Out, class F>
  Out collective(const char* operation, const In& in, F&& combine) {
    static_assert(sizeof(In) <= sizeof(LaneData) && sizeof(Out) <= sizeof(LaneData));
    Thread& self = *current_thread();
    Warp& warp = warps_[static_cast<std::size_t>(self.index / 32)];
    const int lane = self.index % 32;
    if (warp.arrived == 0)
      warp.operation = operation;
    else if (warp.operation != operation)
      fail(std::string("simt: lanes of a warp meet in different operations: ") + operation +
           " and " + warp.operation);
    std::memcpy(warp.in[lane].bytes, &in, sizeof in);
    self.waits_for_warp = warp.generation + 1;
    if (++warp.arrived == 32) {
      In ins[32];
      Out outs[32];
      for (int i = 0; i < 32; ++i) std::memcpy(&ins[i], warp.in[i].bytes, sizeof(In));
      combine(ins, outs);
      for (int i = 0; i < 32; ++i) std::memcpy(warp.out[i].bytes, &outs[i], sizeof(Out));
      warp.arrived = 0;
      ++warp.generation;
    }
    // One place for results is enough: the next operation completes only when all have arrived at
    // it, and so have taken this one's.
    while (warp.generation < self.waits_for_warp) self.fiber.yield();
    self.waits_for_warp = 0;
    Out out;
    std::memcpy(&out, warp.out[lane].bytes, sizeof out);
    return out;
  }

  // Takes the text away: the caller's fiber is abandoned and destroys nothing any more.
  [[noreturn]] void fail(std::string&& what) {
    std::string taken = std::move(what);
    if (fault_.empty()) fault_.swap(taken);
    taken = std::string();
    while (true) current_thread()->fiber.yield();  // never resumed: run() throws
  }

  Schedule schedule() const { return schedule_; }

 private:
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };

  static void entry(void* argument) {
    Thread& self = *static_cast<Thread*>(argument);
    self.block->body_();
    self.done = true;
  }

  std::vector<int> turn_order(int n) {
    std::vector<int> order(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i)
      order[static_cast<std::size_t>(i)] = schedule_.order == Order::reversed ? n - 1 - i : i;
    if (schedule_.order == Order::shuffled)
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_() % i]);
    return order;
  }

  bool runnable(const Thread& thread) const {
    if (thread.done || barrier_generation_ < thread.waits_for_barrier) return false;
    const Warp& warp = warps_[static_cast<std::size_t>(thread.index / 32)];
    return warp.generation >= thread.waits_for_warp;
  }

  // Runs a warp as far as it goes without the others (shuffled: now and then not so far).
  bool run_warp(int warp) {
    bool moved = false;
    const std::vector<int> lanes = turn_order(32);
    for (bool again = true; again && fault_.empty();) {
      again = false;
      for (const int lane : lanes) {
        Thread& thread = threads_[static_cast<std::size_t>(warp * 32 + lane)];
        if (!runnable(thread) || !fault_.empty()) continue;
        current_thread() = &thread;
        thread.fiber.resume();
        again = moved = true;
      }
      if (schedule_.order == Order::shuffled && random_() % 16 == 0) break;
    }
    return moved;
  }

  std::string describe_stall() const {
    int barrier = 0, warp = 0, done = 0;
    for (const Thread& thread : threads_) {
      if (thread.done)
        ++done;
      else if (thread.waits_for_warp != 0)
        ++warp;
      else
        ++barrier;
    }
    return "simt: no thread can go on: " + std::to_string(barrier) + " wait at a barrier, " +
           std::to_string(warp) + " in a warp operation, " + std::to_string(done) + " have left";
  }

  Dim dim_;
  const std::function<void()>& body_;
  Schedule schedule_;
  std::mt19937_64 random_;
  std::size_t shared_size_ = 0;
  std::unique_ptr<unsigned char, Free> shared_;
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  int barrier_arrived_ = 0;
  std::uint64_t barrier_generation_ = 0;
  std::string fault_;
};

/// Runs `body` as a kernel of `grid` blocks, one after the other in the schedule's order.
inline void launch(int grid, int threads, std::size_t shared_bytes,
                   const std::function<void()>& body) {
  static std::vector<std::unique_ptr<FiberStack>> stacks;
  Schedule schedule = current_schedule();
  std::mt19937_64 random(schedule.seed);
  std::vector<int> order(static_cast<std::size_t>(grid));
  for (int i = 0; i < grid; ++i)
    order[static_cast<std::size_t>(i)] = schedule.order == Order::reversed ? grid - 1 - i : i;
  if (schedule.order == Order::shuffled) std::shuffle(order.begin(), order.end(), random);
  for (const int index : order) {
    schedule.seed = random();
    ++statistics().blocks;
    Block block({index, grid, threads}, shared_bytes, body, schedule, stacks);
    block.run();
  }
}

/// The float of each 16-bit pattern, by table: conversions are most of an emulated mma.
template <class T>
const float* float_table() {
  static const std::vector<float> table = [] {
    std::vector<float> values(65536);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = chunkattn::to_float(T{static_cast<std::uint16_t>(i)});
    return values;
  }();
  return table.data();
}

}  // namespace simt

CHUNKATTN_NAMESPACE_BEGIN
namespace ptx {

struct SharedAddress {
  std::uint32_t value;
  SharedAddress operator+(int bytes) const { return {value + static_cast<std::uint32_t>(bytes)}; }
};

inline simt::Block& block() {
  return *simt::current_thread()->block;
}
inline int thread_index() {
  return simt::current_thread()->index;
}
inline int block_index() {
  return block().dim().block;
}
inline int grid_size() {
  return block().dim().grid;
}
inline int block_size() {
  return block().dim().threads;
}
inline int opaque(int value) {
  return value;
}
inline unsigned char* dynamic_shared() {
  return block().shared();
}
inline SharedAddress shared_address(const void* pointer) {
  return {block().offset_of(pointer)};
}
inline void barrier() {
  block().barrier();
}

template <class V>
V shuffle_xor(V value, int mask) {
  return block().template collective<V, V>("shuffle", value, [mask](const V* in, V* out) {
    for (int lane = 0; lane < 32; ++lane) out[lane] = in[lane ^ mask];
  });
}

inline bool any(bool condition) {
  return block().template collective<bool, bool>("any", condition, [](const bool* in, bool* out) {
    std::fill(out, out + 32, std::find(in, in + 32, true) != in + 32);
  });
}

inline int atomic_add(int* target, int value) {
  const int old = *target;
  *target += value;
  return old;
}

inline void cp_async_16(SharedAddress target, const void* source, bool valid) {
  ++simt::statistics().cp_async;
  simt::PendingCopy copy{block().shared_at(target.value, 16, "cp.async"), {}, nullptr};
  if (valid) {
    if (reinterpret_cast<std::uintptr_t>(source) % 16 != 0)
      block().fail("simt: cp.async from an address that is no multiple of 16");
    copy.source = source;
  }
  if (block().schedule().copies == simt::Copies::at_issue) {
    if (valid)
      std::memcpy(copy.target, source, 16);
    else
      std::memset(copy.target, 0, 16);
    copy.target = nullptr;
  }
  simt::current_thread()->open.push_back(copy);
}

inline void cp_async_commit() {
  simt::Thread& self = *simt::current_thread();
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

inline void cp_async_wait(int pending) {
  simt::Thread& self = *simt::current_thread();
  while (self.groups.size() > static_cast<std::size_t>(pending)) {
    for (const simt::PendingCopy& copy : self.groups.front()) {
      if (copy.target == nullptr) continue;
      if (copy.source != nullptr)
        std::memcpy(copy.target, copy.source, 16);
      else
        std::memset(copy.target, 0, 16);
    }
    self.groups.erase(self.groups.begin());
  }
}

struct Quad {
  std::uint32_t r[4];
};

inline void ldmatrix(std::uint32_t (&r)[4], SharedAddress row, bool transposed) {
  simt::Block& self = block();
  self.shared_at(row.value, 16, "ldmatrix");
  const Quad quad = self.collective<std::uint32_t, Quad>(
      transposed ? "ldmatrix.trans" : "ldmatrix", row.value,
      [&](const std::uint32_t* rows, Quad* out) {
        for (int m = 0; m < 4; ++m) {
          std::uint16_t matrix[8][8];
          for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], self.shared() + rows[8 * m + i], 16);
          for (int lane = 0; lane < 32; ++lane) {
            const int i = lane / 4, j = 2 * (lane % 4);
            const std::uint32_t low = transposed ? matrix[j][i] : matrix[i][j];
            const std::uint32_t high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
            out[lane].r[m] = low | (high << 16);
          }
        }
      });
  for (int m = 0; m < 4; ++m) r[m] = quad.r[m];
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], SharedAddress row) {
  ldmatrix(r, row, false);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], SharedAddress row) {
  ldmatrix(r, row, true);
}

struct MmaIn {
  std::uint32_t a[4], b[2];
  float c[4];
};
struct MmaOut {
  float d[4];
};

template <class T>
void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const MmaIn mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const MmaOut result =
      block().template collective<MmaIn, MmaOut>("mma", mine, [](const MmaIn* in, MmaOut* out) {
        ++simt::statistics().mma;
        const float* table = simt::float_table<T>();
        float am[16][16], bm[8][16];  // bm: by column
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = 2 * (lane % 4);
          for (int i = 0; i < 4; ++i) {
            am[g + 8 * (i % 2)][t + 8 * (i / 2)] = table[in[lane].a[i] & 0xffffu];
            am[g + 8 * (i % 2)][t + 8 * (i / 2) + 1] = table[in[lane].a[i] >> 16];
          }
          for (int i = 0; i < 2; ++i) {
            bm[g][t + 8 * i] = table[in[lane].b[i] & 0xffffu];
            bm[g][t + 8 * i + 1] = table[in[lane].b[i] >> 16];
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = 2 * (lane % 4);
          for (int i = 0; i < 4; ++i) {
            const float* row = am[g + 8 * (i / 2)];
            const float* column = bm[t + i % 2];
            float sum = 0;
            for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
            out[lane].d[i] = in[lane].c[i] + sum;
          }
        }
      });
  for (int i = 0; i < 4; ++i) d[i] = result.d[i];
}

template <class T>
std::uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | (static_cast<std::uint32_t>(from_float<T>(high).bits) << 16);
}

inline float exp2(float x) {
  return std::exp2(x);
}
inline float max(float a, float b) {
  return std::fmax(a, b);
}
inline float fma(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float log2(float x) {
  return std::log2(x);
}

}  // namespace ptx
CHUNKATTN_NAMESPACE_END
