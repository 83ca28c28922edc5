// WindowedGroups: all groups of layers with a window that a model has, resumed and admitted as one
// (docs/windows.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../tree_options.hpp"
#include "detail/window_group.hpp"
#include "detail/window_resume.hpp"
#include "windowed_layers.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The groups of a model: one for each window that its layers have, none for a model without. A
/// sequence is resumed where all have its window, and a prompt joins where the tree and all groups
/// have chunks. Calls are as those of WindowedLayers; views are those of each group.
///
/// \tparam Tree  a PrefixTree
template <class Tree>
class WindowedGroups {
 public:
  using Group = WindowedLayers<Tree>;            ///< one of them
  using Options = typename Group::Options;       ///< of one of them
  using token_type = typename Tree::token_type;  ///< what prompts are made of
  using Sequence = typename Tree::Sequence;      ///< a sequence of the tree

  /// A group for each of these, in their order.
  /// \throws InvalidArgument for options out of range
  WindowedGroups(Tree& tree, std::span<const Options> groups)
      : shared_(detail::TreeAccess::shared(tree)) {
    for (const Options& options : groups) {
      groups_.push_back(std::make_unique<Group>(tree, options));
      inner_.push_back(&detail::WindowAccess::group(*groups_.back()));
    }
  }
  /// The same of groups that are written out: {{.window = 512, .max_chunks = 1000}}.
  WindowedGroups(Tree& tree, std::initializer_list<Options> groups)
      : WindowedGroups(tree, std::span(groups.begin(), groups.size())) {}
  WindowedGroups(const WindowedGroups&) = delete;
  WindowedGroups& operator=(const WindowedGroups&) = delete;

  /// How many there are.
  [[nodiscard]] std::size_t size() const noexcept { return groups_.size(); }
  /// One of them: for its KvCache, its view() and its stats().
  [[nodiscard]] Group& operator[](std::size_t i) const {
    if (i >= size()) [[unlikely]]
      detail::fail_argument("group", i, {"below size(), ", size()});
    return *groups_[i];
  }

  /// WindowedLayers::is_ready() of all.
  [[nodiscard]] bool is_ready(const Sequence& sequence) const {
    return std::all_of(groups_.begin(), groups_.end(),
                       [&](const auto& group) { return group->is_ready(sequence); });
  }
  /// WindowedLayers::resume() of all: from the last position on before which all have the window.
  /// Of none: what num_scheduled() is.
  /// \throws InvalidArgument as that does
  /// \throws OutOfChunks with nothing changed
  std::size_t resume(Sequence& sequence) {
    if (const detail::WindowGroup* const lacking = lacking_for(sequence)) [[unlikely]]
      lacking->fail_out_of_chunks();
    return sequence.num_scheduled();
  }
  /// Of a prompt, where it would be resumed: not after what match_prefix() says is cached.
  [[nodiscard]] std::size_t find(TokenSpan<token_type> prompt,
                                 const InsertOptions& options = {}) const {
    return search(prompt, options).position(inner_);
  }
  /// Of each group's chunks_available(), what a prompt takes at most from where it would be resumed
  /// until it is computed: for its window, and for steps that have at most `max_tokens` rows of it
  /// at once.
  [[nodiscard]] std::vector<std::size_t> chunks_needed(TokenSpan<token_type> prompt,
                                                       std::size_t max_tokens,
                                                       const InsertOptions& options = {}) const {
    std::vector<std::size_t> needed;
    if (groups_.empty()) return needed;
    const detail::PromptSearch found = search(prompt, options);
    for (const detail::WindowGroup* const group : inner_)
      needed.push_back(found.chunks_needed(*group, inner_, max_tokens));
    return needed;
  }
  /// Inserts a prompt and resumes it. Nothing, with nothing changed but what was cached, where
  /// chunks are missing: of the tree as its chunks_needed() says, or of a group as the one above
  /// does. Where num_pending() is not 0, others compute some of it first, and resume() comes then,
  /// as is_ready() says.
  /// \param tree        that of the groups
  /// \param max_tokens  rows of it in steps at once, at most
  /// \throws InvalidArgument for another tree, and as insert() does
  [[nodiscard]] std::optional<Sequence> try_insert(Tree& tree, TokenSpan<token_type> prompt,
                                                   std::size_t max_tokens,
                                                   const InsertOptions& options = {}) {
    if (detail::TreeAccess::shared(tree) != shared_) [[unlikely]]
      detail::fail_argument("tree", "another", "that of the groups");
    detail::check_prompt(prompt);
    const std::vector<std::size_t> needed = chunks_needed(prompt, max_tokens, options);
    for (std::size_t i = 0; i < size(); ++i)
      if (needed[i] > groups_[i]->chunks_available()) return std::nullopt;
    auto sequence = tree.try_insert(prompt, options);
    if (sequence && sequence->num_pending() == 0) resume(*sequence);  // for which there is room
    return sequence;
  }
  /// Whether the groups have the chunks that a step takes: then view() of each throws no
  /// OutOfChunks. For admission before build().
  [[nodiscard]] bool has_room(const typename Tree::Step& step) const {
    return std::all_of(groups_.begin(), groups_.end(), [&](const auto& group) {
      return group->chunks_needed(step) <= group->chunks_available();
    });
  }

 private:
  friend struct detail::ResumeAccess;
  template <class All>
  void add_resume_points(All& all) const {
    for (const auto& group : groups_) detail::ResumeAccess::add(*group, shared_, all);
  }
  [[nodiscard]] detail::PromptSearch search(TokenSpan<token_type> prompt,
                                            const InsertOptions& options) const {
    detail::check_argument(shared_->tree.has_value(), "windowed groups", "orphaned",
                           "those of a tree that still exists");
    return {*shared_->tree, prompt, options};
  }
  // Resumes it, or returns a group that chunks are missing of, with nothing changed.
  [[nodiscard]] const detail::WindowGroup* lacking_for(const Sequence& sequence) {
    if (groups_.empty()) return nullptr;
    const detail::SequenceIndex s = detail::WindowAccess::resumable(*groups_[0], sequence);
    for (detail::WindowGroup* const group : inner_) group->search().index_copies();
    detail::TreeCore& core = shared_->tree->core;
    const detail::SequenceRecord& record = core.sequences[s];
    return detail::resume(core, inner_, s, detail::nearest(inner_, record.tail, record.cursor));
  }

  std::remove_cvref_t<decltype(detail::TreeAccess::shared(std::declval<const Tree&>()))> shared_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<detail::WindowGroup*> inner_;  // of each
};

CHUNKATTN_NAMESPACE_END
