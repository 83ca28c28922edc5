// Checkpoints: states of a model's recurrent layers (SSM, linear attention), kept for prompts that
// begin with the same tokens (docs/windows.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/token_tree.hpp"
#include "../tree_options.hpp"
#include "detail/node_checkpoints.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Checkpoints of the paths of one tree. They move with the tokens before them as nodes are split
/// and merged, and go when the K/V of these does, or with clear().
///
/// Its calls, its end too, are calls of the tree: the caller locks. The tree may move, and may end
/// before it; then all calls but stats() throw InvalidArgument. A tree may have several, which know
/// nothing of each other; each costs 20 bytes per node.
///
/// \tparam Tree  a PrefixTree
template <class Tree>
class Checkpoints {
 public:
  using token_type = typename Tree::token_type;  ///< what prompts are made of
  using Sequence = typename Tree::Sequence;      ///< a sequence of the tree

  /// The state of a model's recurrent layers after the first `position` tokens of a path. What it
  /// is, only the engine knows.
  struct Checkpoint {
    std::size_t position = 0;           ///< 0: begin with the state of no token
    std::shared_ptr<const void> state;  ///< as save() got it
  };
  /// How many are kept.
  struct Options {
    std::size_t max_count = 0;      ///< of all, 1 or more; beyond it the least recently used go
    std::int32_t max_per_path = 8;  ///< of the path of any one prompt, 1 or more
  };
  /// Counts since construction, and the present state.
  struct Stats {
    std::size_t count = 0;  ///< those that are kept
    /// Those that were evicted for others, and not because their tokens went.
    std::uint64_t evicted = 0;
  };

  /// None yet, of this tree.
  /// \throws InvalidArgument for options out of range
  explicit Checkpoints(Tree& tree, Options options)
      : shared_(detail::TreeAccess::shared(tree)),
        nodes_(std::make_shared<detail::NodeCheckpoints>(
            shared_->tree->core, checked(options).max_count, options.max_per_path)) {}
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;
  ~Checkpoints() {
    if (shared_->tree) {
      shared_->tree->core.topology.observers.remove(*nodes_);
      nodes_->on_clear();
    }
    nodes_->end();
  }

  /// Before the first step of a sequence, when num_pending() is 0 (until then, who computes may
  /// save one further on), and whenever its state is lost: has all tokens computed from the nearest
  /// checkpoint on. K/V that is there already is not written again. The state is kept as long as
  /// the result is.
  /// \throws InvalidArgument for a sequence of another tree (here and below), one that is in a
  ///         step, or of which outputs are to come
  Checkpoint resume(Sequence& sequence) {
    const detail::SequenceIndex s = index_of(sequence);
    const detail::TreeCore& core = shared_->tree->core;
    if (const auto& record = core.sequences[s]; record.steps > 0 || record.reserved > 0)
        [[unlikely]]
      detail::fail_argument("sequence", "in a step, or its outputs are to come",
                            "one that goes on after resume() only");
    const std::int32_t i = nodes_->resume(s, core.readable_length(s));
    if (i == detail::none) return {};
    const detail::CheckpointRecord& found = nodes_->table()[i];
    return {detail::to_size(found.position), found.state};
  }
  /// The next position at which a checkpoint is wanted: where the prompt leaves what another one
  /// has, exact to the token, and before its last token. Sequence::whole if none is. So that rows
  /// end there: `step.add(s, (std::min)(max_tokens, states.next(s) - s.num_scheduled()))`.
  [[nodiscard]] std::size_t next(const Sequence& sequence) const {
    const std::int32_t position = nodes_->next(index_of(sequence));
    return position == detail::none ? Sequence::whole : detail::to_size(position);
  }
  /// Keeps the state after the first `position` tokens, at any position, for prompts that begin
  /// with these. It is evicted after Options::max_count others were used, when the path has too
  /// many of them, with the K/V of the tokens, and by clear(). The end of a state must neither
  /// throw nor call the tree.
  /// O(path), and as much for each path with checkpoints that continues after it; so is the end of
  /// a sequence with checkpoints whose output merges into an equal path.
  /// \returns whether it is kept: not if there is one, or if clear() was called since the sequence
  ///          joined
  /// \throws InvalidArgument unless `position` is from 1 to num_written(), and for a null state
  bool save(const Sequence& sequence, std::size_t position, std::shared_ptr<const void> state) {
    const detail::SequenceIndex s = index_of(sequence);
    if (const std::size_t end = sequence.num_written(); position < 1 || position > end) [[unlikely]]
      detail::fail_argument("position", position, {"1 to num_written(), ", end});
    if (state == nullptr) [[unlikely]]
      detail::fail_argument("state", "null", "what resume() is to return");
    return nodes_->save(s, static_cast<std::int32_t>(position), std::move(state));
  }
  /// Of a prompt, the position of the last checkpoint that is not after what match_prefix() says
  /// is cached: where a model with recurrent layers would begin. 0: there is none.
  [[nodiscard]] std::size_t find(TokenSpan<token_type> prompt,
                                 const InsertOptions& options = {}) const {
    check_tree();
    const auto& tree = *shared_->tree;
    const detail::PathMatch match = tree.find(prompt, options);
    const std::size_t cached = tree.result_of(match, options).cached;
    const std::int32_t i = nodes_->nearest(match.last, static_cast<std::int32_t>(cached));
    return i == detail::none ? 0 : detail::to_size(nodes_->table()[i].position);
  }
  /// What there is. O(1).
  [[nodiscard]] Stats stats() const noexcept {
    return {nodes_->table().size(), nodes_->num_evicted()};
  }

 private:
  friend struct detail::ResumeAccess;
  template <class All>
  void add_resume_points(All& all) const {
    all.push_back(nodes_);
  }
  static const Options& checked(const Options& options) {
    detail::check_argument(options.max_count >= 1, "max_count", options.max_count, "at least 1");
    detail::check_argument(options.max_per_path >= 1, "max_per_path", options.max_per_path,
                           "at least 1");
    return options;
  }
  void check_tree() const {
    detail::check_argument(shared_->tree.has_value(), "checkpoints", "orphaned",
                           "those of a tree that still exists");
  }
  [[nodiscard]] detail::SequenceIndex index_of(const Sequence& sequence) const {
    check_tree();
    if (sequence.tree_id() != shared_->tree->core.id) [[unlikely]]
      detail::fail_argument("sequence", "of another tree", "one of this tree");
    return detail::TreeAccess::index(sequence);
  }

  std::remove_cvref_t<decltype(detail::TreeAccess::shared(std::declval<const Tree&>()))> shared_;
  std::shared_ptr<detail::NodeCheckpoints> nodes_;  // who follows them may outlive them
};

CHUNKATTN_NAMESPACE_END
