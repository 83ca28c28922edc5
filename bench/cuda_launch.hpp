// Plays one launch of the CUDA backend on a modelled GPU: blocks take items in order; an item first
// waits for its chain of latencies, then streams, sharing the memory with the blocks that stream
// beside it, and merges when the partial results that it needs are there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <vector>

namespace model {

/// An H200 at two blocks per multiprocessor and head dimension 128. Frozen: schedules are changed
/// to suit it, not the other way round, and it is changed by measurements on a GPU alone.
struct Machine {
  int num_blocks = 264;         ///< 132 multiprocessors, two blocks each (registers, shared memory)
  double bytes_per_us = 4.3e6;  ///< copies of 2 GB; 4.8 TB/s is what the data sheet says
  /// From the L2 into all multiprocessors: two thirds of 5,120 bytes per clock at 1,755 MHz, which
  /// are 8,986 GB/s (table 3 of doi:10.1016/j.ultsonch.2023.106546). That no more than that comes
  /// is assumed: half of all lines lie in the other partition.
  double l2_bytes_per_us = 6.0e6;
  /// One block alone: 32 KB under way (one stage of 32 KB) per 1.2 us of loaded memory latency.
  double block_bytes_per_us = 27e3;
  /// Shared memory, one of two blocks: 128 bytes per clock at 1,755 MHz for a multiprocessor, of
  /// which 78 % are assumed for what items count. (All of it would be 345 TFLOP/s for 64-row tiles;
  /// 240 to 300 are expected of such kernels. This is 269. Token tables and the like, which items
  /// leave out, are 13 to 26 % of a KV tile's wavefronts: ./dev gpu_counts.)
  double block_shared_per_us = 87.6e3;
  /// mma.sync, one of two blocks: 62 % of 989 TFLOP/s, the data sheet's dense rate, which only
  /// wgmma comes near.
  double block_flops_per_us = 2.32e6;
  /// Issue slots for one warp: each of four schedulers has a warp of two blocks, one slot per
  /// clock.
  double warp_instructions_per_us = 877;
  double task_us = 3.0;    ///< ticket, task, tables, first K/V, results: five ways in a row
  double merge_us = 0.15;  ///< one partial result of 128 threads' columns, of four read at a time
  double launch_us = 2.0;  ///< start and drain of a kernel inside a graph
  double wait_us = 1.0;    ///< from another block's last store to the read after its flag
  /// Of task_us, in one launch: all of them but the last pass while the task before has K/V to wait
  /// for. (The model counts that as its streaming.)
  double ahead = 0.8;
  /// What comes of the next task's K/V while a task makes its last products, waits for partial
  /// results, merges and writes: one stage of 32 KB.
  double ahead_bytes = 32 * 1024;
};

/// What one (task, KV head) pair does.
struct Item {
  double memory_bytes = 0;  ///< from device memory
  double bytes = 0;         ///< through the L2 too
  double flops = 0;
  double wait_us = 0;   ///< before streaming
  double end_us = 0;    ///< after it: partial results that it merges, once they are there
  double write_us = 0;  ///< then: its own results, on their way
  std::vector<std::size_t> needs{};  ///< the items that make them, which stand before this
  double shared_bytes = 0;           ///< into and out of shared memory
  double instructions = 0;           ///< of each warp, beside mma
};

/// How long an item computes, whatever comes from memory.
inline double products_us(const Machine& machine, const Item& item) {
  return std::max({item.flops / machine.block_flops_per_us,
                   item.shared_bytes / machine.block_shared_per_us,
                   item.instructions / machine.warp_instructions_per_us});
}

/// One launch, event by event. What an item merges in the end (`end_us`), it does when those that
/// it needs have done so.
///
/// A launch that runs ahead draws tickets as the kernel does: a block holds two from the start, a
/// third from when the first one's K/V has come. Then the next item begins: `ahead` of task_us has
/// passed of its start, and its first K/V comes while the one before waits, merges and writes.
class Launch {
 public:
  Launch(const Machine& machine, const std::vector<Item>& items, double ahead)
      : machine_(machine),
        items_(items),
        ahead_(ahead),
        states_(items.size()),
        blocks_(static_cast<std::size_t>(machine.num_blocks)) {
    for (std::size_t i = 0; i < items.size(); ++i) {
      states_[i].missing = items[i].needs.size();
      for (const std::size_t needed : items[i].needs) states_[needed].needed_by.push_back(i);
    }
  }

  /// Microseconds from the first ticket to the last block's end.
  double play() {
    for (Block& block : blocks_) {
      block.current = draw(block);
      if (block.current == none) continue;
      states_[block.current].is_current = true;
      timers_.push({items_[block.current].wait_us, block.current, Timer::begin});
    }
    if (ahead_ > 0)
      for (Block& block : blocks_) block.next = draw(block);
    while (!timers_.empty() || !streams_.empty()) step();
    return now_;
  }

 private:
  static constexpr std::size_t none = ~std::size_t{0};
  struct Block {
    std::size_t current = none, next = none, after = none;  // items whose tickets it holds
  };
  struct State {
    std::size_t block = 0;
    std::size_t missing = 0;  // of the items that it needs
    std::vector<std::size_t> needed_by{};
    double left = 1;          // the part of its K/V that has not come
    bool is_current = false;  // of its block
    bool begun = false;       // its first K/V comes
    bool streamed = false;
  };
  struct Stream {
    std::size_t item;
    double left, most;  // bytes, bytes per microsecond
    double l2;          // bytes through the L2 for each of these
    double rate = 0;    // what it gets of `most`
  };
  struct Timer {
    enum What { begin, streamed, end, leave };
    double until;
    std::size_t item;
    What what;
    bool operator>(const Timer& other) const { return until > other.until; }
  };

  std::size_t draw(const Block& block) {
    if (drawn_ == items_.size()) return none;
    states_[drawn_].block = static_cast<std::size_t>(&block - blocks_.data());
    return drawn_++;
  }

  // To the next event.
  void step() {
    share_memory();
    double us = timers_.empty() ? 1e30 : timers_.top().until - now_;
    for (std::size_t i = 0; i < streams_.size(); ++i)
      us = std::min(us, streams_[i].left / streams_[i].rate);
    now_ += us;
    std::size_t kept = 0;
    came_.clear();
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      streams_[i].left -= streams_[i].rate * us;
      if (streams_[i].left > 1e-3)
        streams_[kept++] = streams_[i];
      else
        came_.push_back(streams_[i].item);
    }
    streams_.resize(kept);
    for (const std::size_t item : came_) {
      if (states_[item].is_current)
        streamed(item);
      else
        states_[item].left -= first_part(item);
    }
    while (!timers_.empty() && timers_.top().until <= now_ + 1e-9) {
      const Timer timer = timers_.top();
      timers_.pop();
      if (timer.what == Timer::begin)
        begin(timer.item);
      else if (timer.what == Timer::streamed)
        streamed(timer.item);
      else if (timer.what == Timer::end)
        end(timer.item);
      else
        leave(timer.item);
    }
  }
  // No block gets more than it can take, the rest is shared evenly: the L2, then the memory.
  void share_memory() {
    double all = 0;
    for (Stream& stream : streams_) {
      stream.rate = stream.most;
      all += stream.most * stream.l2;
    }
    if (all > machine_.l2_bytes_per_us)
      share(machine_.l2_bytes_per_us, [](const Stream& stream) { return stream.l2; });
    share(machine_.bytes_per_us, [](const Stream&) { return 1.0; });
  }
  // Shares `rest` bytes per microsecond, of which a stream takes weight(stream) for each of its
  // own.
  template <class Weight>
  void share(double rest, const Weight& weight) {
    std::sort(streams_.begin(), streams_.end(), [&](const Stream& a, const Stream& b) {
      return a.rate * weight(a) < b.rate * weight(b);
    });
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      Stream& stream = streams_[i];
      const double share = rest / static_cast<double>(streams_.size() - i);
      stream.rate = std::min(stream.rate, share / weight(stream));
      rest -= stream.rate * weight(stream);
    }
  }

  // The part of an item's K/V that comes while the item before it waits and merges.
  double first_part(std::size_t item) const {
    return std::min(1.0, machine_.ahead_bytes / items_[item].bytes);
  }
  void begin(std::size_t i) {
    states_[i].begun = true;
    if (states_[i].is_current) return stream(i);
    const Item& item = items_[i];
    if (item.bytes > 0)
      streams_.push_back({i, first_part(i) * item.memory_bytes,
                          machine_.block_bytes_per_us * item.memory_bytes / item.bytes,
                          item.bytes / item.memory_bytes});
  }
  // All that has not come yet, and the products.
  void stream(std::size_t i) {
    const Item& item = items_[i];
    const double left = states_[i].left;
    const double alone =
        std::max(left * item.bytes / machine_.block_bytes_per_us, products_us(machine_, item));
    if (alone == 0)
      streamed(i);
    else if (left * item.memory_bytes < 1)
      timers_.push({now_ + alone, i, Timer::streamed});
    else
      streams_.push_back({i, left * item.memory_bytes, left * item.memory_bytes / alone,
                          item.bytes / item.memory_bytes});
  }
  void streamed(std::size_t i) {
    Block& block = blocks_[states_[i].block];
    if (ahead_ > 0) {
      if (block.next != none) start(block.next);
      block.after = draw(block);
    }
    states_[i].streamed = true;
    if (states_[i].missing == 0) timers_.push({now_ + items_[i].end_us, i, Timer::end});
  }
  void start(std::size_t i) {
    const double us = std::max(items_[i].wait_us - ahead_ * machine_.task_us, 0.0);
    timers_.push({now_ + us, i, Timer::begin});
  }
  // Its results are there; they are on their way to memory for another moment.
  void end(std::size_t i) {
    for (const std::size_t other : states_[i].needed_by)
      if (--states_[other].missing == 0 && states_[other].streamed)
        timers_.push({now_ + machine_.wait_us + items_[other].end_us, other, Timer::end});
    timers_.push({now_ + items_[i].write_us, i, Timer::leave});
  }
  void leave(std::size_t i) {
    Block& block = blocks_[states_[i].block];
    block.current = ahead_ > 0 ? block.next : draw(block);
    block.next = block.after;
    if (block.current == none) return;
    State& state = states_[block.current];
    state.is_current = true;
    if (ahead_ == 0) start(block.current);
    if (!state.begun) return;
    const auto coming = std::find_if(streams_.begin(), streams_.end(),
                                     [&](const Stream& s) { return s.item == block.current; });
    if (coming != streams_.end()) {  // its first K/V, still
      state.left -= first_part(block.current) - coming->left / items_[block.current].memory_bytes;
      streams_.erase(coming);
    }
    stream(block.current);
  }

  const Machine& machine_;
  const std::vector<Item>& items_;
  double ahead_;
  std::vector<State> states_;
  std::vector<Block> blocks_;
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
  std::vector<Stream> streams_;
  std::vector<std::size_t> came_;
  std::size_t drawn_ = 0;
  double now_ = 0;
};

}  // namespace model
