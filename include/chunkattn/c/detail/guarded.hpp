// How a function of the C interface fails: nothing it calls throws beyond it, and what was wrong
// becomes the text of chunkattn_error().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string_view>

#include "../../detail/support/config.hpp"

#if !CHUNKATTN_EXCEPTIONS
#error "chunkattn: the C interface needs exceptions, which become texts there"
#endif

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

inline constexpr std::size_t error_size = 1024;

inline char* error_text() noexcept {
  thread_local char text[error_size] = "";
  return text;
}

/// Says why a call has failed. What is beyond the checks of this interface gets its names here: a
/// processor that lacks instructions, a system that starts no more threads.
inline void set_error(std::string_view text) noexcept {
  constexpr std::string_view processor = "options.instruction_set = automatic";
  const char* name = "";
  if (text.starts_with("num_threads = ")) name = "config.";
  if (text.starts_with(processor)) {
    name = "the processor = this one";
    text.remove_prefix(processor.size());
  }
  std::snprintf(error_text(), error_size, "%s%.*s", name,
                static_cast<int>((std::min)(text.size(), error_size)), text.data());
}

/// Calls f; what it throws becomes the text of chunkattn_error(), and the result is `failed`.
template <class Result, class F>
Result guarded(Result failed, const F& f) noexcept {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    set_error("out of memory");
  } catch (const std::length_error&) {
    set_error("out of memory");
  } catch (const std::exception& error) {
    set_error(error.what());
  } catch (...) {
    set_error("an unknown exception");
  }
  return failed;
}

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
