// Failures: a family of exceptions, or a handler in builds without exceptions.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "detail/support/config.hpp"
#include "detail/support/message.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Base of all exceptions of the library. what() is one line: what was wrong and what was expected.
class Error : public std::runtime_error {
 public:
  /// \param message     what() returns it
  /// \param file, line  where the check stands; filled in by the compiler
  explicit Error(const std::string& message, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE())
      : std::runtime_error(message), file_(file), line_(line) {}

  /// The library's source that the check stands in, as __FILE__.
  [[nodiscard]] const char* file() const noexcept { return file_; }
  /// The line of the check there.
  [[nodiscard]] int line() const noexcept { return line_; }

 private:
  const char* file_;
  int line_;
};

/// A bad argument: what() names it, its value and what was expected. Nothing has changed.
class InvalidArgument : public Error {
 public:
  /// \param message  "argument = value: expected ..."
  // Not `using Error::Error`: nvcc 13.0 cannot inherit a constructor with this default argument.
  explicit InvalidArgument(const std::string& message, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE())
      : Error(message, file, line) {}
};

/// The allocator's budget is spent. A normal event under load: the `try_` functions report it
/// without throwing. Live sequences, their handles and their K/V are as before.
class OutOfChunks : public Error {
 public:
  /// All counts are in chunks.
  /// \param asked      what the operation needed
  /// \param available  what was free or evictable
  /// \param capacity   the whole budget
  /// \param alone      the least that the operation needs if the tree has no other sequence
  CHUNKATTN_COLD OutOfChunks(std::size_t asked, std::size_t available, std::size_t capacity,
                             std::size_t alone = 0, const char* file = __builtin_FILE(),
                             int line = __builtin_LINE())
      : Error(detail::joined({"out of chunks: asked for ", asked, ", ", available, " available of ",
                              capacity}) +
                  (alone > capacity ? detail::joined({"; this never fits, as it takes ", alone,
                                                      " even alone: refuse the request, or raise "
                                                      "max_chunks"})
                                    : "; wait for a sequence to leave, or raise max_chunks"),
              file, line),
        asked_(asked),
        available_(available),
        capacity_(capacity),
        never_fits_(alone > capacity) {}

  /// Chunks that the operation needed.
  [[nodiscard]] std::size_t asked() const noexcept { return asked_; }
  /// Chunks that were free or evictable.
  [[nodiscard]] std::size_t available() const noexcept { return available_; }
  /// The whole budget, in chunks.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// Whether waiting cannot help: the operation needs more than the whole budget.
  [[nodiscard]] bool never_fits() const noexcept { return never_fits_; }

 private:
  std::size_t asked_, available_, capacity_;
  bool never_fits_;
};

/// A call of the device's runtime failed: what() names the call and its error code.
class DeviceError : public Error {
 public:
  /// \param call  the runtime's function
  /// \param code  its result
  /// \param text  the runtime's own words for it
  CHUNKATTN_COLD DeviceError(std::string_view call, int code, std::string_view text,
                             const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : Error(detail::joined({call, " failed with code ", code, " (", text, ")"}), file, line),
        code_(code) {}

  /// The runtime's error code.
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

namespace detail {

using FailureHandler = void (*)(const Error&);

inline void print_and_abort(const Error& error) {
  std::fprintf(stderr, "chunkattn: %s\n", error.what());
  std::abort();
}

inline FailureHandler& current_failure_handler() noexcept {
  static FailureHandler handler = &print_and_abort;
  return handler;
}

}  // namespace detail

/// Replaces the handler that is called for failures in builds with -fno-exceptions, and returns the
/// old one. The default prints the message to stderr and aborts. Builds with exceptions never call
/// it.
/// \param handler  must not return; null: the default
inline auto set_failure_handler(void (*handler)(const Error&)) noexcept -> void (*)(const Error&) {
  const detail::FailureHandler old = detail::current_failure_handler();
  detail::current_failure_handler() = handler != nullptr ? handler : &detail::print_and_abort;
  return old;
}

CHUNKATTN_NAMESPACE_END
