// InUse: refuses a second call in an object that one thread at a time may use.
#pragma once

#include <atomic>

#include "check.hpp"
#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// A member of such an object. One that was moved to is not in use.
class InUse {
 public:
  InUse() = default;
  InUse(InUse&&) noexcept {}
  InUse& operator=(InUse&&) noexcept {
    busy_.store(false, std::memory_order_relaxed);
    return *this;
  }

  /// A call, as long as it lives. It takes an atomic exchange, and is no lock: calls do not wait.
  class Call {
   public:
    /// \throws InvalidArgument for `object` if it is in use
    Call(InUse& object, const char* name) : in_use_(object) {
      check_argument(!in_use_.busy_.exchange(true, std::memory_order_acquire), name,
                     "in use by another call",
                     "one call at a time: an object for each thread, or a lock around it");
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() { in_use_.busy_.store(false, std::memory_order_release); }

   private:
    InUse& in_use_;
  };

 private:
  std::atomic<bool> busy_{false};
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
