// WriteCheck: the check that each step writes each layer before it reads it
// (KvCacheOptions::check_writes).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../support/check.hpp"
#include "../support/config.hpp"
#include "../support/step_observers.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What each step of a tree has written to one K/V cache so far. The tree reports steps, kernels
/// what they write and read; both on any thread.
class WriteCheck final : public StepObserver {
 public:
  /// \param id  of the tree or the group whose plans have the cache's chunks
  WriteCheck(int num_layers, int num_kv_heads, std::uint64_t id)
      : num_layers_(num_layers), heads_(num_kv_heads), id_(id) {}

  /// A plan was built for the step: forgets what was written by an earlier plan of it.
  /// \param writes  there are rows to write, or copies to make
  CHUNKATTN_COLD void on_built(std::uint64_t step, bool writes, std::uint64_t id) override {
    if (id != id_) return;  // of layers that another cache has
    const std::lock_guard guard(mutex_);
    erase(step);
    if (writes)
      steps_.push_back({step, std::vector<std::int32_t>(static_cast<std::size_t>(num_layers_) *
                                                        static_cast<std::size_t>(heads_))});
  }
  /// The KV heads [first, first + count) of the layer are written, or queued to be.
  CHUNKATTN_COLD void wrote(std::uint64_t step, int layer, int first, int count) {
    const std::lock_guard guard(mutex_);
    if (Writes* const writes = find(step))
      for (int head = first; head < first + count; ++head) ++writes->times[at(layer, head)];
  }
  /// Throws InvalidArgument unless they are.
  CHUNKATTN_COLD void check_read(std::uint64_t step, int layer, int first, int count) {
    const std::lock_guard guard(mutex_);
    if (const Writes* const writes = find(step)) check(*writes, layer, first, count, "run()");
  }
  /// Throws InvalidArgument unless the step has written all of every layer.
  CHUNKATTN_COLD void on_finish(std::uint64_t step) override {
    const std::lock_guard guard(mutex_);
    if (const Writes* const writes = find(step))
      for (int layer = 0; layer < num_layers_; ++layer)
        check(*writes, layer, 0, heads_, "finish()");
  }
  /// The step has finished or was dropped.
  CHUNKATTN_COLD void on_ended(std::uint64_t step) noexcept override {
    const std::lock_guard guard(mutex_);
    erase(step);
  }

 private:
  struct Writes {
    std::uint64_t step;
    std::vector<std::int32_t> times;  // [layer][KV head]
  };

  [[nodiscard]] std::size_t at(int layer, int head) const noexcept {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(heads_) +
           static_cast<std::size_t>(head);
  }
  [[nodiscard]] Writes* find(std::uint64_t step) noexcept {
    for (Writes& writes : steps_)
      if (writes.step == step) return &writes;
    return nullptr;  // it has nothing to write, or was there before the cache
  }
  void erase(std::uint64_t step) noexcept {
    std::erase_if(steps_, [step](const Writes& writes) { return writes.step == step; });
  }

  void check(const Writes& writes, int layer, int first, int count, const char* before) const {
    for (int head = first; head < first + count; ++head)
      if (writes.times[at(layer, head)] == 0)
        fail_argument(
            "layer", layer,
            {"step ", writes.step, " to write ", missing(writes, layer, head), " before ", before,
             ", by write() or by kernels reported by mark_written()", hint(writes)});
  }
  [[nodiscard]] std::string missing(const Writes& writes, int layer, int head) const {
    const auto* const times = writes.times.data() + at(layer, 0);
    if (std::all_of(times, times + heads_, [](std::int32_t n) { return n == 0; })) return "it";
    return joined({"its KV head ", head});
  }
  // The likeliest reason is that another layer was written twice.
  [[nodiscard]] std::string hint(const Writes& writes) const {
    for (int layer = 0; layer < num_layers_; ++layer)
      if (const std::int32_t times = writes.times[at(layer, 0)]; times > 1)
        return joined({"; layer ", layer, " was written ", times, " times"});
    return {};
  }

  int num_layers_, heads_;
  std::uint64_t id_;
  std::mutex mutex_;
  std::vector<Writes> steps_;  // at most those in flight, and the open one
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
