// Checks of arguments, and how they fail: in builds without exceptions, too.
#pragma once

#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "../../error.hpp"
#include "config.hpp"
#include "message.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Where a check stands in the library's source; filled in by the compiler at the call.
struct SourceLocation {
  const char* file = "";  ///< as __FILE__
  int line = 0;           ///< as __LINE__

  /// The place of the call, by its default arguments.
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          int line = __builtin_LINE()) noexcept {
    return {file, line};
  }
};

template <class E>
[[noreturn]] CHUNKATTN_COLD void fail(const E& error) {
  static_assert(std::is_base_of_v<Error, E>, "only the chunkattn::Error family is thrown");
#if CHUNKATTN_EXCEPTIONS
  throw error;
#else
  current_failure_handler()(error);
  std::abort();
#endif
}

/// Throws InvalidArgument "argument = value: expected ...". Not string_view in the second form:
/// braces around a text and a number could make one.
[[noreturn]] CHUNKATTN_COLD inline void fail_argument(
    std::string_view argument, MessagePart value, MessageParts expected,
    SourceLocation where = SourceLocation::current()) {
  fail(InvalidArgument(joined({argument, " = ", value, ": expected "}) + joined(expected),
                       where.file, where.line));
}

[[noreturn]] CHUNKATTN_COLD inline void fail_argument(
    std::string_view argument, MessagePart value, const char* expected,
    SourceLocation where = SourceLocation::current()) {
  fail_argument(argument, value, MessageParts{expected}, where);
}

/// Checks one argument. `expected` completes the sentence "expected ...".
template <class Value>
CHUNKATTN_INLINE void check_argument(bool ok, std::string_view argument, const Value& value,
                                     const char* expected,
                                     SourceLocation where = SourceLocation::current()) {
  if (!ok) [[unlikely]]
    fail_argument(argument, value, expected, where);
}

template <class Value>
CHUNKATTN_INLINE void check_argument(bool ok, std::string_view argument, const Value& value,
                                     MessageParts expected,
                                     SourceLocation where = SourceLocation::current()) {
  if (!ok) [[unlikely]]
    fail_argument(argument, value, expected, where);
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
