// ResumePoints: where paths can be resumed, of a component that keeps something of some tokens (K/V
// of windows, states of recurrent layers), and who is told when that changes.
#pragma once

#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/chunk_table.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class ResumePoints;

/// Is told what a component keeps.
class ResumeWatch {
 public:
  virtual ~ResumeWatch() = default;
  /// Of these tokens of a node the component keeps something from now on, or no longer. Nothing is
  /// said of tokens that are dropped, and of those that a split moves to another node.
  virtual void on_kept(const ResumePoints& of, NodeIndex n, std::int32_t first, std::int32_t count,
                       bool is_kept) = 0;
};

/// A component with which a path can be resumed at any position before which it keeps all of the
/// last reach() tokens.
class ResumePoints {
 public:
  explicit ResumePoints(std::int32_t reach) : reach_(reach) {}
  ResumePoints(const ResumePoints&) = delete;
  ResumePoints& operator=(const ResumePoints&) = delete;
  virtual ~ResumePoints() = default;

  [[nodiscard]] std::int32_t reach() const noexcept { return reach_; }
  /// Tells `to` which of these tokens of a node it keeps.
  virtual void tell_kept(ResumeWatch& to, NodeIndex n, std::int32_t first,
                         std::int32_t count) const = 0;

  /// So that watch() throws nothing.
  void reserve_watch() { watches_.reserve_more(1); }
  void watch(ResumeWatch& watch) noexcept {
    watches_.push_back(&watch);
    set_watched(true);
  }
  void unwatch(const ResumeWatch& watch) noexcept {
    watches_.erase_if([&](const ResumeWatch* other) { return other == &watch; });
    set_watched(is_watched());
  }
  [[nodiscard]] bool is_watched() const noexcept { return !watches_.empty(); }

 protected:
  void tell(NodeIndex n, std::int32_t first, std::int32_t count, bool is_kept) const noexcept {
    for (ResumeWatch* const watch : watches_) watch->on_kept(*this, n, first, count, is_kept);
  }

 private:
  /// Whether anybody watches.
  virtual void set_watched(bool) noexcept {}

  const std::int32_t reach_;
  Array<ResumeWatch*> watches_;
};

/// Components have resume_points(), and know their tree.
struct ResumeAccess {
  /// Appends those of a component of this tree to `all`.
  template <class Component, class Shared, class All>
  static void add(const Component& component, const Shared& shared, All& all) {
    if (component.shared_ != shared) [[unlikely]]
      fail_argument("component", "of another tree", "one of this tree");
    component.add_resume_points(all);
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
