// What a serving engine already has, and what this library takes from it: a block allocator, a
// thread pool, K/V memory with kernels that write it.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace engine {

using Token = std::int32_t;

/// The engine's block manager, made a chunkattn::ChunkAllocator: blocks it lends out elsewhere
/// (here: `reserved`, the first ones) are never handed to the tree.
class BlockManager {
 public:
  BlockManager(std::size_t num_blocks, std::size_t reserved) : num_blocks_(num_blocks) {
    for (std::size_t i = num_blocks; i-- > reserved;)
      free_.push_back(static_cast<chunkattn::SlotIndex>(i));
    capacity_ = free_.size();
  }
  chunkattn::SlotIndex allocate() {
    if (free_.empty()) return chunkattn::no_slot;
    const chunkattn::SlotIndex slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void free(chunkattn::SlotIndex slot) noexcept { free_.push_back(slot); }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::size_t available() const noexcept { return free_.size(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return num_blocks_; }

 private:
  std::vector<chunkattn::SlotIndex> free_;
  std::size_t num_blocks_, capacity_ = 0;
};
static_assert(chunkattn::ChunkAllocator<BlockManager>);

/// The engine's threads, made a chunkattn::Executor. (A real engine has a queue; this one starts
/// its threads anew, which is all an example needs.)
class Threads {
 public:
  explicit Threads(int num_threads) : num_threads_(num_threads) {}
  [[nodiscard]] int concurrency() const noexcept { return num_threads_; }

  template <class F>
  void parallel_for(int n, F&& f) {
    std::vector<std::jthread> threads;
    for (int t = 1; t < num_threads_; ++t)
      threads.emplace_back([&, t] {
        for (int i = t; i < n; i += num_threads_) f(i);
      });
    for (int i = 0; i < n; i += num_threads_) f(i);
  }

 private:
  int num_threads_;
};
static_assert(chunkattn::Executor<Threads>);

/// The engine's K/V memory of one layer, [block][head][token][head_dim] for K and for V. The
/// library sees it through a view and never owns it.
template <class T>
struct LayerMemory {
  std::vector<T> k, v;
  chunkattn::KvView<T> view;

  LayerMemory(int num_blocks, int num_kv_heads, int chunk_size, int head_dim)
      : k(size(num_blocks, num_kv_heads, chunk_size, head_dim)), v(k.size()) {
    view = chunkattn::make_kv_view(k.data(), v.data(),
                                   {.num_slots = num_blocks,
                                    .num_kv_heads = num_kv_heads,
                                    .chunk_size = chunk_size,
                                    .head_dim = head_dim});
  }

 private:
  static std::size_t size(int a, int b, int c, int d) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b) *
           (static_cast<std::size_t>(c) * static_cast<std::size_t>(d));
  }
};

/// The engine's own K/V-writing kernel in place of ChunkAttention::write: first the plan's row
/// copies, then one row per query token. k, v: [num_rows][num_kv_heads][head_dim], the caller's row
/// order.
template <class T>
void write_kv(const chunkattn::KvView<T>& kv, const chunkattn::PlanView& plan,
              std::span<const float> k, std::span<const float> v) {
  for (int c = 0; c < plan.num_copies; ++c) {
    const chunkattn::PlanView::RowCopy& copy = plan.copies[c];
    for (int h = 0; h < kv.num_kv_heads; ++h)
      for (int t = 0; t < copy.length; ++t)
        for (int i = 0; i < kv.head_dim; ++i) {
          kv.k_row(copy.target_slot, h, copy.target_begin + t)[i] =
              kv.k_row(copy.source_slot, h, copy.source_begin + t)[i];
          kv.v_row(copy.target_slot, h, copy.target_begin + t)[i] =
              kv.v_row(copy.source_slot, h, copy.source_begin + t)[i];
        }
  }
  for (int row = 0; row < plan.num_rows; ++row) {
    const chunkattn::PlanView::WriteTarget target = plan.writes[row];
    if (target.slot == chunkattn::no_slot)
      continue;  // already written: by an earlier step or a sharer
    for (int h = 0; h < kv.num_kv_heads; ++h)
      for (int i = 0; i < kv.head_dim; ++i) {
        const auto from = static_cast<std::size_t>((row * kv.num_kv_heads + h) * kv.head_dim + i);
        kv.k_row(target.slot, h, target.offset)[i] = chunkattn::from_float<T>(k[from]);
        kv.v_row(target.slot, h, target.offset)[i] = chunkattn::from_float<T>(v[from]);
      }
  }
}

}  // namespace engine
