// Ownership of a step's record.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "../../tree_options.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "shared_tree.hpp"
#include "step_record.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Ownership of a step's record, whatever the step's state.
template <class Tree>
class StepHandle {
 public:
  using Shared = SharedTree<Tree>;

  StepHandle(std::shared_ptr<Shared> shared, std::int32_t index)
      : shared_(std::move(shared)), index_(index), number_(core().steps[index].number) {
    shared_->count_handle();
  }
  StepHandle(StepHandle&& other) noexcept = default;
  StepHandle& operator=(StepHandle&& other) noexcept = default;

  [[nodiscard]] bool empty() const noexcept { return shared_ == nullptr; }
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] Tree& tree() const {
    if (shared_ == nullptr || !shared_->tree) [[unlikely]]
      fail_dead();
    return *shared_->tree;
  }
  [[nodiscard]] TreeCore& core() const { return tree().core; }
  [[noreturn]] void fail_dead() const {
    if (shared_ == nullptr) fail_argument("step", "moved-from", "a step that was not moved from");
    fail_argument("step", "orphaned", "a step whose tree still exists");
  }
  [[nodiscard]] StepRecord& record() const { return core().steps[index_]; }
  /// The same as core(), with what other threads dropped meanwhile settled.
  TreeCore& enter() const {
    TreeCore& entered = core();
    shared_->enter();
    return entered;
  }
  [[nodiscard]] const std::shared_ptr<Shared>& shared() const noexcept { return shared_; }

  template <typename Shared::Drop What>
  void drop() noexcept {
    if (shared_) shared_->template drop<What>(index_, number_);
    shared_.reset();
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::int32_t index_ = none;
  std::uint64_t number_ = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
