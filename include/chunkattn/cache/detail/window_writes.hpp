// WindowWrites: the slots that steps which are not over are to write, of a group of layers with a
// sliding window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/step_table.hpp"
#include "window_chunks.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A step holds the chunks of its slots until it is over, whatever becomes of the sequences.
class WindowWrites {
 public:
  WindowWrites(WindowChunks& chunks, const StepTable& steps) : chunks_(chunks), steps_(steps) {}

  /// The slots of one step: those of its copies, then those of each entry.
  struct OfStep {
    std::uint64_t step = 0;              ///< its number; 0: of none
    const ViewTicket* ticket = nullptr;  ///< with its number: of the step's plan that they are of
    std::uint64_t ticket_number = 0;
    std::size_t num_copied = 0;
    Array<WindowChunks::Slots> slots;
    Array<std::size_t> ends;  ///< by entry

    void set_step(const StepRecord& of) noexcept {
      step = of.number;
      ticket = of.ticket.get();
      ticket_number = of.ticket_number;
    }
    /// Whether they are of the plan that was built last for a step with its number.
    [[nodiscard]] bool is_of(const StepRecord& of) const noexcept {
      return ticket == of.ticket.get() && ticket_number == of.ticket_number;
    }
  };

  [[nodiscard]] const OfStep* find(std::uint64_t step) const noexcept {
    for (const OfStep& writes : all_)
      if (writes.step == step) return &writes;
    return nullptr;
  }
  [[nodiscard]] OfStep* find(std::uint64_t step) noexcept {
    return const_cast<OfStep*>(std::as_const(*this).find(step));
  }
  /// Room for those of a step; the caller sets its number.
  [[nodiscard]] OfStep& unused(std::size_t num_slots, std::size_t num_entries) {
    OfStep* writes = find(0);
    if (writes == nullptr) writes = &all_.emplace_back();
    writes->slots.clear();
    writes->slots.reserve(num_slots);
    writes->ends.resize(num_entries);
    return *writes;
  }
  void add(OfStep& writes, const WindowChunks::Slots& slots) noexcept {
    chunks_.hold(slots.chunk);
    chunks_.plan(slots);
    writes.slots.push_back(slots);
  }
  /// The slots [begin, end) of a step that is over.
  void settle(const OfStep& writes, std::size_t begin, std::size_t end, bool counts) noexcept {
    for (std::size_t i = begin; i < end; ++i) {
      chunks_.settle(writes.slots[i], counts);
      chunks_.release(writes.slots[i].chunk);
    }
  }
  /// An open step is planned again.
  void drop(std::uint64_t step) noexcept {
    OfStep* const writes = find(step);
    if (writes == nullptr) return;
    settle(*writes, 0, writes->slots.size(), /*counts=*/false);
    writes->step = 0;
  }
  /// Planned is what steps are to write that are not void. One that is may have the slots of a
  /// later one: of a copy, say.
  void plan_again() noexcept {
    for (const bool counts : {false, true})
      for (const OfStep& writes : all_) {
        if (steps_.is_void(writes.step) == counts) continue;  // so is what has no step
        for (const WindowChunks::Slots& slots : writes.slots)
          counts ? chunks_.plan(slots) : chunks_.settle(slots, false);
      }
  }
  /// For tests: adds how often each chunk is held.
  void count_holds(Array<std::int32_t>& holds) const {
    for (const OfStep& writes : all_)
      for (std::size_t i = 0; writes.step != 0 && i < writes.slots.size(); ++i)
        ++holds[to_size(writes.slots[i].chunk)];
  }

 private:
  WindowChunks& chunks_;
  const StepTable& steps_;
  std::vector<OfStep> all_;  ///< at most those that are not over, and one
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
