// StepObservers: whoever follows the steps of a tree, as caches that check their writes do.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Called on the thread that uses the tree.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  /// A plan was built for the step; an earlier plan of it is out of date.
  /// \param writes  there are rows to write, or copies to make
  /// \param id      PlanView::tree_id: the tree's, or that of a group with chunks of its own
  virtual void on_built(std::uint64_t step, bool writes, std::uint64_t id) = 0;
  /// The step is about to finish; what is thrown here stops it.
  virtual void on_finish(std::uint64_t step) = 0;
  /// The step has finished or was dropped.
  virtual void on_ended(std::uint64_t step) noexcept = 0;
};

/// The observers of a tree that still exist.
class StepObservers {
 public:
  /// Whether there may be any.
  [[nodiscard]] bool any() const noexcept { return !observers_.empty(); }
  void add(const std::shared_ptr<StepObserver>& observer) {
    std::erase_if(observers_, [](const auto& other) { return other.expired(); });
    observers_.push_back(observer);
  }
  template <class F>
  void for_each(const F& f) {
    for (const std::weak_ptr<StepObserver>& known : observers_)
      if (const auto observer = known.lock()) f(*observer);
  }

 private:
  std::vector<std::weak_ptr<StepObserver>> observers_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
