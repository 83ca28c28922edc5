// OpenMpTeam: the threads that a runtime of OpenMP keeps for one thread that calls it.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "../../detail/support/config.hpp"
#include "../../detail/support/fork_mark.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// How many threads the runtime has for a caller. It starts them in a parallel region and ends the
/// process if the system refuses one, so it is to be known before a region whether it will start
/// some: if the one before had fewer threads (GCC's runtime ends those that a region does not use),
/// or if threads have ended since (a region of the engine's had fewer).
class OpenMpTeam {
 public:
  /// Whether a region of `count` threads starts none.
  [[nodiscard]] bool has(int count) const noexcept {
    return count <= asked_ && alive_.load(std::memory_order_relaxed) >= (std::min)(count, given_);
  }
  /// Whether its threads stayed behind in the parent of this process, where the runtime would wait
  /// for them.
  [[nodiscard]] bool was_left_behind() const noexcept { return asked_ > 0 && mark_.is_in_child(); }

  /// A region of `count` threads is over. It may have had fewer: one, inside of another region.
  void had_region(int count) noexcept {
    if (asked_ == 0) mark_ = {};  // the first one, of this process
    asked_ = count;
    given_ = alive_.load(std::memory_order_relaxed);
  }

  /// The calling thread's.
  [[nodiscard]] static const std::shared_ptr<OpenMpTeam>& of_caller() {
    thread_local const auto team = std::make_shared<OpenMpTeam>();
    return team;
  }

  /// In each thread of a region: counts it until it ends.
  static void enter(const std::shared_ptr<OpenMpTeam>& team) noexcept {
    thread_local Member member;
    if (member.team == team) return;
    member.leave();
    member.team = team;
    team->alive_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  struct Member {
    std::shared_ptr<OpenMpTeam> team;

    Member() = default;
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;
    ~Member() { leave(); }
    void leave() noexcept {
      if (team) team->alive_.fetch_sub(1, std::memory_order_relaxed);
    }
  };

  std::atomic<int> alive_{0};
  int asked_ = 0, given_ = 0;  // by the last region
  ForkMark mark_;              // of its first region
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
