// Where a model resumes a sequence or a prompt that has several groups of layers with a window, and
// what of each group's chunks that takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "window_group.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Has a sequence computed from a position on that all groups of a model have the window of. Null,
/// or with nothing changed the group that chunks are missing of.
template <class Groups>
const WindowGroup* resume(TreeCore& core, const Groups& groups, SequenceIndex s,
                          std::int32_t position) {
  struct Prepared {
    const Groups& groups;
    std::size_t count = 0;
    ~Prepared() {
      while (count > 0) groups[--count]->cancel_resume();
    }
  } prepared{groups};
  for (WindowGroup* const group : groups) {
    if (!group->prepare_resume(s, position)) return group;
    ++prepared.count;
  }
  for (WindowGroup* const group : groups) group->commit_resume(s, position);  // nothing to cancel
  core.sequences[s].cursor = position;
  return nullptr;
}
/// The last position up to `limit` of the path to `last` whose windows all groups have.
template <class Groups>
[[nodiscard]] std::int32_t nearest(const Groups& groups, NodeIndex last,
                                   std::int32_t limit) noexcept {
  for (std::int32_t position = limit;; limit = position) {
    for (const WindowGroup* const group : groups)
      position = group->search().nearest(last, position);
    if (position == limit) return position;
  }
}

/// A prompt that is to join a tree, as far as groups are concerned.
class PromptSearch {
 public:
  /// \param tree  a TokenTree
  template <class Tree>
  PromptSearch(const Tree& tree, std::span<const typename Tree::token_type> prompt,
               const InsertOptions& options)
      : match_(tree.find(prompt, options)),
        size_(static_cast<std::int32_t>((std::min)(prompt.size(), to_size(max_length)))),
        cached_(static_cast<std::int32_t>(tree.result_of(match_, options).cached)),
        computes_last_(options.compute_last) {
    if (!options.share_pending) tree.trim_to_written(match_);
  }
  /// Where all groups have the window, of what is cached.
  template <class Groups>
  [[nodiscard]] std::size_t position(const Groups& groups) const noexcept {
    return to_size(nearest(groups, match_.last, cached_));
  }
  /// WindowSearch::chunks_needed() of a group, where all resume it.
  template <class Groups>
  [[nodiscard]] std::size_t chunks_needed(const WindowGroup& group, const Groups& groups,
                                          std::size_t max_tokens) const {
    check_argument(max_tokens >= 1, "max_tokens", max_tokens, "at least 1 row");
    const std::int32_t limit = computes_last_ ? (std::min)(cached_, size_ - 1) : cached_;
    return group.search().chunks_needed(
        match_, size_, nearest(groups, match_.last, limit),
        static_cast<std::int32_t>((std::min)(max_tokens, to_size(size_))));
  }

 private:
  PathMatch match_;
  std::int32_t size_, cached_;
  bool computes_last_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
