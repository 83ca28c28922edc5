// Blocks under way on the host: fibers for threads, shared memory, barriers, warp operations, and
// the turns that blocks, warps and lanes take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "chunkattn/detail/support/check.hpp"
#include "simt/fiber.hpp"
#include "simt/memory.hpp"

namespace simt {

enum class Order { forward, reversed, shuffled };
enum class Copies { at_issue, at_wait };

/// How blocks, warps and lanes take turns. `resident` blocks are under way at a time. Forward: from
/// barrier to barrier, block by block. Reversed: a block goes on until it has to wait for another.
/// Shuffled: by chance, and one block of the launch moves only when no other can.
struct Schedule {
  Order order = Order::forward;
  Copies copies = Copies::at_issue;
  std::uint64_t seed = 1;
  int resident = 3;
};

inline Schedule& current_schedule() {
  static Schedule schedule;
  return schedule;
}

/// Counts what kernels did, for tests that must know that something happened.
struct Statistics {
  std::uint64_t mma = 0, cp_async = 0, barriers = 0, blocks = 0, pauses = 0, powers = 0;
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
  bool paused = false;  // waits for another block's memory; runs again in the block's next turn
  std::uint64_t operations = 0;
  std::uint64_t waits_for_barrier = 0;  // generation that must have passed
  std::uint64_t waits_for_warp = 0;
  std::vector<std::vector<PendingCopy>> groups;  // committed, oldest first
  std::vector<PendingCopy> open;                 // issued, not yet committed
};

struct Warp {
  int arrived = 0;
  std::uint64_t generation = 0;             // completed operations
  chunkattn::detail::SourceLocation place;  // where the lanes meet
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
        std::vector<std::unique_ptr<FiberStack>>& stacks, LaunchMemory& memory)
      : dim_(dim), body_(body), schedule_(schedule), random_(schedule.seed), memory_(memory) {
    shared_size_ = shared_bytes;
    void* shared = nullptr;  // exactly as large as asked for: AddressSanitizer guards both ends
    if (posix_memalign(&shared, 128, std::max<std::size_t>(shared_bytes, 1)) != 0)
      throw Fault("simt: out of memory");
    shared_.reset(static_cast<unsigned char*>(shared));
    std::memset(shared, 0xff, shared_bytes);
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

  /// Goes on for `turns` turns, in each of which every warp runs as far as it can, or until no
  /// thread can. False: nothing has moved.
  bool run(int turns) {
    bool any = false;
    for (int turn = 0; turn < turns && !done(); ++turn) {
      for (Thread& thread : threads_) thread.paused = false;
      bool moved = false;
      for (const int warp : turn_order(dim_.threads / 32)) moved |= run_warp(warp);
      if (!fault_.empty()) throw Fault(fault_);
      any |= moved;
      if (!moved) break;
    }
    return any;
  }

  /// All threads have left.
  bool done() const {
    for (const Thread& thread : threads_)
      if (!thread.done) return false;
    for (const Thread& thread : threads_)
      if (!thread.open.empty() || !thread.groups.empty())
        throw Fault("simt: thread " + std::to_string(thread.index) +
                    " left with asynchronous copies under way");
    return true;
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

  void barrier(chunkattn::detail::SourceLocation where) {
    Thread& self = *current_thread();
    ++statistics().barriers;
    meet(where, barrier_place_, barrier_arrived_ == 0,
         "threads of a block meet at different barriers");
    self.waits_for_barrier = barrier_generation_ + 1;
    if (++barrier_arrived_ == dim_.threads) {
      barrier_arrived_ = 0;
      ++barrier_generation_;
    }
    while (barrier_generation_ < self.waits_for_barrier) self.fiber.yield();
    self.waits_for_barrier = 0;
  }

  /// All 32 lanes bring `in`, to the same place in the source; the last to arrive computes every
  /// lane's result.
  template <class In, class Out, class F>
  Out collective(chunkattn::detail::SourceLocation where, const In& in, F&& combine) {
    static_assert(sizeof(In) <= sizeof(LaneData) && sizeof(Out) <= sizeof(LaneData));
    Thread& self = *current_thread();
    Warp& warp = warps_[static_cast<std::size_t>(self.index / 32)];
    const int lane = self.index % 32;
    meet(where, warp.place, warp.arrived == 0, "lanes of a warp meet in different operations");
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

  /// The thread waits for what another block does to memory.
  void pause() {
    Thread& self = *current_thread();
    ++statistics().pauses;
    self.paused = true;
    self.fiber.yield();
  }

  /// An atomic of a word, after which atomics of another may be seen first unless a fence is
  /// between.
  void atomic(const void* word) {
    if (last_atomic_ != nullptr && last_atomic_ != word)
      fail("simt: atomics of two words without a fence between them");
    last_atomic_ = word;
  }
  void fence() { last_atomic_ = nullptr; }

  LaunchMemory& memory() { return memory_; }
  Moment now() {
    Thread& self = *current_thread();
    return {dim_.block, self.index, barrier_generation_, ++self.operations};
  }

  Schedule schedule() const { return schedule_; }

  /// What its threads wait for.
  std::string describe_stall() const {
    int barrier = 0, warp = 0, paused = 0, done = 0;
    for (const Thread& thread : threads_) {
      if (thread.done)
        ++done;
      else if (thread.paused)
        ++paused;
      else if (thread.waits_for_warp != 0)
        ++warp;
      else
        ++barrier;
    }
    return "simt: no thread can go on: " + std::to_string(barrier) + " wait at a barrier, " +
           std::to_string(warp) + " in a warp operation, " + std::to_string(paused) +
           " for another block, " + std::to_string(done) + " have left";
  }

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
    if (thread.done || thread.paused || barrier_generation_ < thread.waits_for_barrier)
      return false;
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
        again = true;
        moved = moved || !thread.paused;
      }
      if (schedule_.order == Order::shuffled && random_() % 16 == 0) break;
    }
    return moved;
  }

  // The first to arrive says where; the others must agree.
  void meet(chunkattn::detail::SourceLocation where, chunkattn::detail::SourceLocation& place,
            bool first, const char* what) {
    if (first) place = where;
    if (place.line == where.line && std::strcmp(place.file, where.file) == 0) return;
    fail(std::string("simt: ") + what + ": " + place.file + ":" + std::to_string(place.line) +
         " and " + where.file + ":" + std::to_string(where.line));
  }

  Dim dim_;
  const std::function<void()>& body_;
  Schedule schedule_;
  std::mt19937_64 random_;
  LaunchMemory& memory_;
  std::size_t shared_size_ = 0;
  std::unique_ptr<unsigned char, Free> shared_;
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  int barrier_arrived_ = 0;
  std::uint64_t barrier_generation_ = 0;
  chunkattn::detail::SourceLocation barrier_place_;
  std::string fault_;
  const void* last_atomic_ = nullptr;  // since the last fence
};

/// A kernel of `grid` blocks.
struct Launch {
  int grid, threads;
  std::size_t shared_bytes;
  std::function<void()> body;
};

/// Runs launches side by side: blocks of all of them are under way, of each as many as the schedule
/// says. What blocks exchange is followed only where there is one.
inline void launch_together(const std::vector<Launch>& launches) {
  struct Waiting {
    std::size_t launch;
    int block;
  };
  Schedule schedule = current_schedule();
  std::mt19937_64 random(schedule.seed);
  std::vector<Waiting> order;
  std::size_t places = 0;
  for (std::size_t l = 0; l < launches.size(); ++l) {
    const auto& [grid, threads, shared_bytes, body] = launches[l];
    if (grid < 1) throw Fault("simt: a grid of " + std::to_string(grid) + " blocks");
    if (threads < 32 || threads > 1024 || threads % 32 != 0)
      throw Fault("simt: a block of " + std::to_string(threads) + " threads");
    for (int i = 0; i < grid; ++i)
      order.push_back({l, schedule.order == Order::reversed ? grid - 1 - i : i});
    places += static_cast<std::size_t>(std::clamp(schedule.resident, 1, grid));
  }
  if (schedule.order == Order::shuffled) std::shuffle(order.begin(), order.end(), random);

  static std::vector<std::vector<std::unique_ptr<FiberStack>>> stacks;  // of each place for a block
  if (stacks.size() < places) stacks.resize(places);
  std::vector<LaunchMemory> memories(launches.size(), LaunchMemory(launches.size() == 1));
  std::vector<std::unique_ptr<Block>> running(places);
  std::size_t next = 0, left = order.size();
  const std::size_t lazy = schedule.order == Order::shuffled ? random() % places : places;
  while (left > 0) {
    bool moved = false;
    const auto run = [&](std::size_t place, int turns) {
      std::unique_ptr<Block>& block = running[place];
      if (block == nullptr && next < order.size()) {
        schedule.seed = random();
        ++statistics().blocks;
        const Waiting& waiting = order[next++];
        const Launch& launch = launches[waiting.launch];
        block = std::make_unique<Block>(Dim{waiting.block, launch.grid, launch.threads},
                                        launch.shared_bytes, launch.body, schedule, stacks[place],
                                        memories[waiting.launch]);
      }
      if (block == nullptr) return;
      moved |= block->run(turns);
      if (!block->done()) return;
      block.reset();
      --left;
    };
    for (std::size_t place = 0; place < places; ++place)
      if (place != lazy)
        run(place, schedule.order == Order::forward    ? 1
                   : schedule.order == Order::reversed ? 1 << 30
                                                       : static_cast<int>(random() % 4));
    if (!moved && lazy < places) run(lazy, 1);
    if (!moved && schedule.order == Order::shuffled)  // some had no turn
      for (std::size_t place = 0; place < places; ++place) run(place, 1);
    if (moved) continue;
    for (const auto& block : running)
      if (block != nullptr) throw Fault(block->describe_stall());
  }
}

/// Runs `body` as a kernel of `grid` blocks, of which the schedule's number is under way at a time.
inline void launch(int grid, int threads, std::size_t shared_bytes,
                   const std::function<void()>& body) {
  launch_together({{grid, threads, shared_bytes, body}});
}

}  // namespace simt
