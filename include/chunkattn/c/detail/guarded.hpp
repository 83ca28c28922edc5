// How a function of the C interface fails: nothing it calls throws beyond it, and what was wrong
// becomes the text of chunkattn_error().
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string_view>
#include <utility>

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

/// Names of the C++ library, and what the headers for C call the same.
inline constexpr std::pair<std::string_view, std::string_view> names_in_c[] = {
    {"AttentionPlan::build()", "chunkattn_step_build()"},
    {"Finished::rows()", "chunkattn_step_rows()"},
    {" rows() ", " chunkattn_step_rows() "},
    {"begin_step()", "chunkattn_step_begin()"},
    {" append()", " chunkattn_sequence_append()"},
    {" take_over()", " chunkattn_sequence_take_over()"},
    {"TreeOptions::Sharing::chunk", "CHUNKATTN_SHARE_CHUNKS"},
    {"Sharing::chunk", "CHUNKATTN_SHARE_CHUNKS"},
    {"event.", "event->"},
    {"snapshot.", "snapshot->"},
    {"a live handle, not one moved from or used after leave()", "one whose tree still exists"},
    {"options.instruction_set = automatic", "the processor = this one"},
    {"outputs.size()", "num_outputs"},
    {"range.begin", "begin"},
    {"range.end()", "the end of the range"},
    {"range.length", "length"},
};

/// Says why a call has failed, by the names of the interface for C.
inline void set_error(std::string_view text) noexcept {
  char* to = error_text();
  char* const end = to + error_size - 1;
  const auto put = [&](std::string_view part) {
    to = std::copy_n(part.data(), (std::min)(part.size(), static_cast<std::size_t>(end - to)), to);
  };
  if (text.starts_with("num_threads = ")) put("config.");
  while (!text.empty()) {
    const auto* const name = std::find_if(std::begin(names_in_c), std::end(names_in_c),
                                          [&](auto& pair) { return text.starts_with(pair.first); });
    const bool is_name = name != std::end(names_in_c);
    put(is_name ? name->second : text.substr(0, 1));
    text.remove_prefix(is_name ? name->first.size() : 1);
  }
  *to = 0;
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
