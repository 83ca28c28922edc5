// A tree of one chunk size behind the handles of tree.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "../../attention_plan.hpp"
#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../events/cache_events.hpp"
#include "../../interop/block_table.hpp"
#include "../../plan_view.hpp"
#include "../../prefix_tree.hpp"
#include "../../step.hpp"
#include "../../tree_options.hpp"
#include "../tree.h"
#include "handles.hpp"
#include "records.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

/// As much of `all` as `out` has room for.
template <class T>
void copy_first(std::span<const T> all, std::span<T> out) {
  std::copy_n(all.begin(), (std::min)(all.size(), out.size()), out.begin());
}

/// \tparam Tree  of one chunk size
template <class Tree>
class PinOf final : public chunkattn_pin {
 public:
  [[nodiscard]] std::size_t size() const override { return pin.size(); }

  typename Tree::Pin pin;
};

template <class Tree>
class SequenceOf final : public chunkattn_sequence {
 public:
  SequenceOf() : chunkattn_sequence(Tree::chunk_size) {}

  [[nodiscard]] chunkattn_sequence_info info() const override {
    const auto count = [](std::size_t n) { return static_cast<std::int64_t>(n); };
    return {static_cast<std::uint64_t>(sequence.id()),
            static_cast<std::uint64_t>(sequence.waits_for()),
            count(sequence.size()),
            count(sequence.num_cached()),
            count(sequence.num_uncomputed()),
            count(sequence.num_scheduled()),
            count(sequence.num_written()),
            count(sequence.num_pending()),
            count(sequence.num_shared()),
            count(sequence.num_reserved())};
  }
  bool append(Tokens tokens) override { return sequence.try_append(tokens); }
  std::unique_ptr<chunkattn_sequence> fork(std::size_t length) override {
    auto handle = std::make_unique<SequenceOf>();
    auto forked = sequence.try_fork(length);
    if (!forked) return nullptr;
    handle->sequence = *std::move(forked);
    return handle;
  }
  void truncate(std::size_t length) override { sequence.truncate(length); }
  std::size_t take_over() override { return sequence.take_over(); }
  void copy_tokens(TokenRange range, std::int32_t* out) const override {
    sequence.copy_tokens(range, {out, to_size(range.length)});
  }
  std::size_t pieces(TokenRange range, std::span<chunkattn_piece> out) const override {
    std::size_t count = 0;
    sequence.for_each_run(range, [&](const Piece& piece) {
      if (count < out.size()) out[count] = {piece.chunk, piece.begin, piece.length, piece.position};
      ++count;
    });
    return count;
  }
  std::size_t blocks(std::size_t kv_len, std::span<std::int32_t> out) const override {
    BlockTable table;
    table.add(sequence, kv_len);
    copy_first<std::int32_t>(table.indices(), out);
    return table.indices().size();
  }
  [[nodiscard]] TokenRange loadable() const override { return sequence.loadable(); }
  void mark_loaded(TokenRange range) override { sequence.mark_loaded(range); }

  typename Tree::Sequence sequence;
};

template <class Tree>
class StepOf final : public chunkattn_step {
  using Finished = typename Tree::Finished;

 public:
  void add(chunkattn_sequence& sequence, std::size_t max_tokens, const Drafts<std::int32_t>& drafts,
           chunkattn_added& out) override {
    out = added_of(open().add(of(sequence), max_tokens, drafts), true);
  }
  void add_all(std::span<chunkattn_sequence* const> sequences, std::size_t max_tokens,
               chunkattn_added& out) override {
    Array<typename Tree::Sequence*> all;
    all.reserve(sequences.size());
    for (chunkattn_sequence* const sequence : sequences) all.push_back(&of(*sequence));
    const std::span<typename Tree::Sequence* const> handles(all.data(), all.size());
    out = added_of(open().add(handles, max_tokens), false);
  }
  [[nodiscard]] int num_rows() const override {
    if (const auto* const step = std::get_if<typename Tree::Step>(&state)) return step->num_rows();
    return view_.num_rows;
  }
  void build(chunkattn_step_plan& plan) override {
    view_ = plan.plan.build(open());
    plan.view = view_;
    plan.geometry = {.page_size = Tree::chunk_size,
                     .num_pages = static_cast<std::int32_t>(tree->num_chunks())};
  }
  void copy_tokens(std::int32_t placeholder, std::span<std::int32_t> out) const override {
    built().copy_tokens(out, placeholder);
  }
  void copy_positions(std::span<std::int32_t> out) const override { built().copy_positions(out); }
  void submit() override { state = std::move(open()).submit(); }
  void finish() override {
    if (auto* const step = std::get_if<typename Tree::Step>(&state))
      state = std::move(*step).finish();
    else if (auto* const in_flight = std::get_if<typename Tree::InFlight>(&state))
      state = std::move(*in_flight).finish();
    else
      fail_state("one that is open or in flight");
  }
  std::size_t rows(std::span<chunkattn_row> out) const override {
    std::size_t count = 0;
    for (const ScheduledSequence& row : finished<const Finished>(state).rows()) {
      if (count < out.size()) out[count] = row_of(row);
      ++count;
    }
    return count;
  }
  void commit(const chunkattn_row& row, Tokens outputs, std::optional<std::int32_t> leaf) override {
    finished<Finished>(state).commit(row_of(row), outputs, leaf);
  }
  void commit_all(Tokens outputs) override { finished<Finished>(state).commit(outputs); }

  const Tree* tree = nullptr;  ///< read where `state` has shown that it exists
  std::variant<std::monostate, typename Tree::Step, typename Tree::InFlight,
               typename Tree::Finished>
      state;

 private:
  [[noreturn]] CHUNKATTN_COLD void fail_state(const char* expected) const {
    constexpr const char* names[] = {"not begun", "open", "in flight", "finished"};
    fail_argument("step", names[state.index()], expected);
  }
  [[nodiscard]] typename Tree::Step& open() {
    auto* const step = std::get_if<typename Tree::Step>(&state);
    if (step == nullptr) [[unlikely]]
      fail_state("one that is open");
    return *step;
  }
  [[nodiscard]] const typename Tree::StepView& built() const {
    check_argument(view_.num_rows == num_rows(), "step",
                   "added to since it was built, or not built",
                   "one of chunkattn_step_build(), after the last add()");
    return view_;
  }
  template <class Step, class State>
  [[nodiscard]] Step& finished(State& of) const {
    auto* const step = std::get_if<Finished>(&of);
    if (step == nullptr) [[unlikely]]
      fail_state("one that has finished: see chunkattn_step_finish()");
    return *step;
  }
  [[nodiscard]] static typename Tree::Sequence& of(chunkattn_sequence& sequence) {
    check_argument(sequence.chunk_size == Tree::chunk_size, "sequence", "of another tree",
                   "one of the step's tree");
    return static_cast<SequenceOf<Tree>&>(sequence).sequence;
  }

  typename Tree::StepView view_;  // of the last plan
};

template <class Tree>
class EventsOf final : public chunkattn_events {
 public:
  EventsOf(Tree& tree, chunkattn_event_sink sink, void* context, std::uint64_t stream)
      : events_(stream != 0 ? Events(tree, sink_of(sink, context), stream)
                            : Events(tree, sink_of(sink, context))) {}
  void snapshot(chunkattn_snapshot& out) override {
    auto all = events_.snapshot();
    spans_.clear();
    spans_.reserve(all.spans.size());
    for (const CacheEvent& event : all.spans) spans_.push_back(event_of(event));
    tokens_ = std::move(all.tokens);
    out = {.stream = all.stream,
           .number = all.number,
           .unit = all.unit,
           .reserved = 0,
           .spans = spans_.data(),
           .num_spans = static_cast<std::int64_t>(spans_.size()),
           .tokens = tokens_.data(),
           .num_tokens = static_cast<std::int64_t>(tokens_.size())};
  }

 private:
  using Events = CacheEvents<Tree>;

  static auto sink_of(chunkattn_event_sink sink, void* context) {
    return [sink, context](const CacheEvent& event, Tokens tokens) {
      const chunkattn_event plain = event_of(event);
      sink(context, &plain, tokens.empty() ? nullptr : tokens.data());
    };
  }

  Events events_;
  std::vector<chunkattn_event> spans_;  // of the last snapshot
  std::vector<std::int32_t> tokens_;
};

template <class Tree>
class TreeOf final : public chunkattn_tree {
 public:
  TreeOf(const PoolAllocator& allocator, const TreeOptions& options, RunTimePolicy policy)
      : chunkattn_tree(policy), tree_(allocator, options, std::move(policy)) {}

  std::unique_ptr<chunkattn_sequence> insert(Tokens prompt, const InsertOptions& options) override {
    auto handle = std::make_unique<SequenceOf<Tree>>();
    auto joined = tree_.try_insert(prompt, options);
    if (!joined) return nullptr;
    handle->sequence = *std::move(joined);
    return handle;
  }
  [[nodiscard]] chunkattn_match match(Tokens prompt, const InsertOptions& options) const override {
    const auto [cached, pending] = tree_.match_prefix(prompt, options);
    return {static_cast<std::int64_t>(cached), static_cast<std::int64_t>(pending)};
  }
  [[nodiscard]] std::size_t chunks_needed(Tokens prompt,
                                          const InsertOptions& options) const override {
    return tree_.chunks_needed(prompt, options);
  }
  [[nodiscard]] std::size_t chunks_available() const override { return tree_.chunks_available(); }
  [[nodiscard]] std::size_t num_chunks() const override { return tree_.num_chunks(); }
  [[nodiscard]] TreeStats stats() const override { return tree_.stats(); }
  void clear() override { tree_.clear(); }
  std::size_t trim(std::size_t chunks) override { return tree_.trim(chunks); }
  std::size_t expire(std::uint64_t now) override { return tree_.expire(now); }
  std::unique_ptr<chunkattn_pin> pin(Tokens prompt, const InsertOptions& options) override {
    auto handle = std::make_unique<PinOf<Tree>>();
    handle->pin = tree_.pin(prompt, options);
    if (!handle->pin) return nullptr;
    return handle;
  }
  std::unique_ptr<chunkattn_step> begin_step() override {
    auto handle = std::make_unique<StepOf<Tree>>();
    handle->state = tree_.begin_step();
    handle->tree = &tree_;
    return handle;
  }
  void device_idle() override { tree_.device_idle(); }
  std::unique_ptr<chunkattn_events> events(chunkattn_event_sink sink, void* context,
                                           std::uint64_t stream) override {
    return std::make_unique<EventsOf<Tree>>(tree_, sink, context, stream);
  }

 private:
  Tree tree_;
};

template <int ChunkSize>
using TreeOfSize = PrefixTree<std::int32_t, ChunkSize, PoolAllocator, RunTimePolicy>;

/// Defined where CHUNKATTN_C_TREE(ChunkSize) stands.
template <int ChunkSize>
[[nodiscard]] std::unique_ptr<chunkattn_tree> make_tree(const PoolAllocator& allocator,
                                                        const TreeOptions& options,
                                                        RunTimePolicy policy);

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
