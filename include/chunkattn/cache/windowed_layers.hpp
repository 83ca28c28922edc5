// WindowedLayers: K/V of layers with a sliding window, in chunks of their own that are given back
// as the window moves on (docs/windows.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "../attention_plan.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/chunk_source.hpp"
#include "../detail/support/config.hpp"
#include "../detail/support/step_observers.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/token_tree.hpp"
#include "../plan_view.hpp"
#include "../tree_options.hpp"
#include "detail/window_group.hpp"
#include "detail/window_plan.hpp"
#include "detail/window_resume.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {
/// What other components and tests see beyond the public members.
struct WindowAccess {
  template <class Layers>
  [[nodiscard]] static WindowGroup& group(const Layers& layers) {
    return *layers.group_;
  }
  /// The sequence, where resume() may be called.
  template <class Layers>
  [[nodiscard]] static SequenceIndex resumable(const Layers& layers,
                                               const typename Layers::Sequence& sequence) {
    return layers.resumable(sequence);
  }
  template <class Layers>
  [[nodiscard]] static std::uint64_t id(const Layers& layers) {
    return layers.id_;
  }
  /// The sequence, if it is in no step.
  template <class Layers>
  [[nodiscard]] static SequenceIndex idle(const Layers& layers,
                                          const typename Layers::Sequence& sequence) {
    return layers.idle(sequence);
  }
};
}  // namespace detail

/// The layers of a model that have one sliding window, beside the tree whose chunks stand for all
/// layers without one. The group has a pool of chunks of its own: a live sequence holds those that
/// the window of its next row touches, and sequences that share a prefix hold the same. A KvCache
/// made with it in place of the tree has the memory.
///
/// Its calls, its end too, are calls of the tree: the caller locks. Its views end with it. The tree
/// may move, and may end before it; then all calls but stats(), chunks_available() and options()
/// throw InvalidArgument. A model whose layers have different windows has WindowedGroups.
///
/// \tparam Tree  a PrefixTree
template <class Tree>
class WindowedLayers {
 public:
  using token_type = typename Tree::token_type;        ///< what prompts are made of
  using Sequence = typename Tree::Sequence;            ///< a sequence of the tree
  static constexpr int chunk_size = Tree::chunk_size;  ///< tokens per chunk, as in the tree

  /// The window, and how many chunks there may be.
  struct Options {
    std::int32_t window = 0;     ///< keys that a row sees, its own included: SlidingWindow::size
    std::size_t max_chunks = 0;  ///< of the group, 1 or more
    /// Of these, those that may be cached: windows of no live sequence, before positions at which
    /// prompts part or ended. Unset: all that live sequences leave.
    std::optional<std::size_t> max_cached_chunks{};
  };
  /// The present state, and counts since construction.
  struct Stats {
    std::size_t used_chunks = 0;          ///< held by live sequences, or cached
    std::size_t cached_chunks = 0;        ///< of these, held by no live sequence
    std::size_t peak_used_chunks = 0;     ///< the most that were used at once
    std::uint64_t evicted_chunks = 0;     ///< cached ones that went for others
    std::uint64_t recomputed_tokens = 0;  ///< that resume() had computed again for their windows
  };

  /// Without K/V yet, for sequences that join the tree from now on.
  /// \throws InvalidArgument for options out of range
  explicit WindowedLayers(Tree& tree, Options options)
      : shared_(detail::TreeAccess::shared(tree)),
        options_(checked(options)),
        group_(std::make_shared<detail::WindowGroup>(
            shared_->tree->core, options.window, options.max_chunks,
            options.max_cached_chunks.value_or(options.max_chunks))) {}
  WindowedLayers(const WindowedLayers&) = delete;
  WindowedLayers& operator=(const WindowedLayers&) = delete;
  ~WindowedLayers() {
    if (!shared_->tree) return;
    shared_->tree->core.topology.observers.remove(*group_);
    group_->points().end();
  }

  /// Before the first step of a sequence, when num_pending() is 0, and whenever is_ready() is
  /// false: has its tokens computed from the last position on whose window is there. K/V that is
  /// there already is not written again.
  /// \returns that position, which num_scheduled() is then
  /// \throws InvalidArgument for a sequence of another tree (here and below), or one that is in a
  ///         step, of which outputs are to come, or that waits for tokens of another
  /// \throws OutOfChunks with nothing changed
  std::size_t resume(Sequence& sequence) {
    group_->search().index_copies();
    return resume(sequence, window_end(sequence, Sequence::whole));
  }
  /// The same, from a position that window_end() has returned.
  std::size_t resume(Sequence& sequence, std::size_t position) {
    const detail::SequenceIndex s = resumable(sequence);
    const std::size_t end = window_end(sequence, position);
    if (end != position) [[unlikely]]
      detail::fail_argument("position", position, {end, ", before which the window is there"});
    if (detail::resume(shared_->tree->core, inner(), s, static_cast<std::int32_t>(position)))
        [[unlikely]]
      group_->fail_out_of_chunks();
    return position;
  }
  /// The last position, not after `limit` and what is computed, before which a sequence has the
  /// window.
  [[nodiscard]] std::size_t window_end(const Sequence& sequence, std::size_t limit) const {
    const detail::TreeCore& core = shared_core();
    const detail::SequenceRecord& record = core.sequences[index_of(sequence)];
    const auto end = (std::min)(limit, detail::to_size(record.cursor));
    return detail::to_size(group_->search().nearest(record.tail, static_cast<std::int32_t>(end)));
  }
  /// Whether the sequence can be added to a step as it stands. If not, resume() comes first: before
  /// its first step, and after truncate(), take_over() and K/V that was loaded.
  [[nodiscard]] bool is_ready(const Sequence& sequence) const {
    return group_->is_ready(index_of(sequence));
  }
  /// Of a prompt, where it would be resumed: not after what match_prefix() says is cached.
  [[nodiscard]] std::size_t find(TokenSpan<token_type> prompt,
                                 const InsertOptions& options = {}) const {
    (void)shared_core();
    return detail::PromptSearch(*shared_->tree, prompt, options).position(inner());
  }

  /// The plan of the group's layers, for a step whose plan was built: the same rows and the same
  /// ticket, but the group's chunks, and only those that windows touch. Call it once for each plan,
  /// before write() and run() of any layer of the group; run() takes SlidingWindow{window}, or
  /// another variant with masked() that hides as much, and refuses what does not.
  /// \throws InvalidArgument for a sequence without its window: see is_ready()
  /// \throws OutOfChunks with nothing changed but what was cached; the step is to be dropped
  [[nodiscard]] LiveView view(const typename Tree::StepView& step_view) {
    detail::check_current(step_view);
    if (step_view.tree_id != shared_core().id && step_view.num_rows > 0) [[unlikely]]
      detail::fail_argument("view", "of another tree", "a plan's view of this tree");
    LiveView view = step_view;
    if (view.num_rows == 0) return view;
    const detail::StepRecord& step = open_step(step_view.step_number);
    detail::WindowPlan& plan = plan_for(step_view);
    group_->plan(step, step_view, plan.writes, plan.copies);
    plan.update(step_view, group_->chunks(), options_.window);
    plan.put_into(view);
    view.tree_id = id_;
    view.window = options_.window;
    if (auto& observers = *shared_core().steps.observers(); observers.any()) [[unlikely]]
      observers.for_each([&](detail::StepObserver& o) {
        o.on_built(view.step_number, view.writes_anything(), id_);
      });
    return view;
  }
  /// Chunks that view() takes for an open step, at most: admission asks before build().
  [[nodiscard]] std::size_t chunks_needed(const typename Tree::Step& step) const {
    return group_->chunks_needed(open_step(step.number()));
  }
  /// Chunks that are free or cached.
  [[nodiscard]] std::size_t chunks_available() const noexcept {
    return group_->chunks().num_available();
  }

  /// As PrefixTree::set_free_sink(), of the group's chunks: for poison() of its KvCache.
  template <class Sink = std::nullptr_t>
  void set_free_sink(Sink sink) {
    group_->set_free_sink(detail::make_free_sink(std::move(sink)));
  }
  /// What there is. O(1).
  [[nodiscard]] Stats stats() const noexcept {
    const detail::WindowChunks& chunks = group_->chunks();
    return {chunks.num_used(), chunks.num_cached(), chunks.peak(), chunks.num_evicted(),
            group_->num_recomputed()};
  }
  /// The options that it was made with.
  [[nodiscard]] const Options& options() const noexcept { return options_; }

 private:
  friend struct detail::ChunkAccess;
  friend struct detail::WindowAccess;
  friend struct detail::ResumeAccess;
  struct PlanOf {
    std::weak_ptr<const detail::ViewTicket> ticket;  ///< of an AttentionPlan
    std::unique_ptr<detail::WindowPlan> plan;
  };

  [[nodiscard]] std::array<detail::WindowGroup*, 1> inner() const noexcept {
    return {group_.get()};
  }
  template <class All>
  void add_resume_points(All& all) const {
    all.emplace_back(group_, &group_->points());
  }
  static const Options& checked(const Options& options) {
    detail::check_argument(options.window >= 1, "window", options.window, "at least 1 key");
    detail::check_argument(options.max_chunks >= 1 && options.max_chunks <= max_pool_chunks,
                           "max_chunks", options.max_chunks, "1 to 2^31 - 1");
    return options;
  }
  [[nodiscard]] const detail::TreeCore& shared_core() const {
    detail::check_argument(shared_->tree.has_value(), "windowed layers", "orphaned",
                           "those of a tree that still exists");
    return shared_->tree->core;
  }
  [[nodiscard]] detail::SequenceIndex index_of(const Sequence& sequence) const {
    if (sequence.tree_id() != shared_core().id) [[unlikely]]
      detail::fail_argument("sequence", "of another tree", "one of this tree");
    return detail::TreeAccess::index(sequence);
  }
  [[nodiscard]] detail::SequenceIndex idle(const Sequence& sequence) const {
    const detail::SequenceIndex s = index_of(sequence);
    const auto& record = shared_->tree->core.sequences[s];
    if (record.steps > 0 || record.reserved > 0) [[unlikely]]
      detail::fail_argument("sequence", "in a step, or its outputs are to come",
                            "one that goes on after resume() only");
    return s;
  }
  [[nodiscard]] detail::SequenceIndex resumable(const Sequence& sequence) const {
    const detail::SequenceIndex s = idle(sequence);
    if (const std::size_t pending = sequence.num_pending(); pending > 0) [[unlikely]]
      detail::fail_argument("num_pending()", pending,
                            "0: other sequences are to write these tokens first");
    return s;
  }
  [[nodiscard]] const detail::StepRecord& open_step(std::uint64_t number) const {
    for (const auto& step : shared_core().steps.all())
      if (step->number == number && step->state == detail::StepState::open) return *step;
    detail::fail_argument("step", number, "an open one of this tree");
  }
  [[nodiscard]] detail::ChunkSource chunk_source() const {
    struct Memory {
      decltype(shared_) shared;
      std::shared_ptr<const detail::WindowGroup> group;
    };
    const auto chunks_of = [](const void* source) {
      const auto& memory = *static_cast<const Memory*>(source);
      detail::check_argument(memory.shared->tree.has_value(), "cache", "orphaned",
                             "one whose tree still exists");
      return memory.group->chunks().high_water();
    };
    return {std::make_shared<const Memory>(Memory{shared_, group_}), chunks_of, id_,
            shared_core().steps.observers()};
  }
  // Each AttentionPlan has one, so that plans which are built in turn keep their arrays.
  [[nodiscard]] detail::WindowPlan& plan_for(const LiveView& view) {
    std::erase_if(plans_, [](const PlanOf& known) { return known.ticket.expired(); });
    const auto& ticket = detail::ViewAccess::ticket(view);
    for (const PlanOf& known : plans_)
      if (known.ticket.lock() == ticket) return *known.plan;
    plans_.push_back({ticket, std::make_unique<detail::WindowPlan>()});
    return *plans_.back().plan;
  }

  std::remove_cvref_t<decltype(detail::TreeAccess::shared(std::declval<const Tree&>()))> shared_;
  const Options options_;
  const std::uint64_t id_ = detail::TreeCore::next_id();
  std::shared_ptr<detail::WindowGroup> group_;  // K/V memory reads how many chunks it has
  std::vector<PlanOf> plans_;
};

CHUNKATTN_NAMESPACE_END
