// What a token must be, each with the words of its error.
#pragma once

#include <concepts>
#include <type_traits>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Compared by ==. A floating-point number is not its own equal where it is NaN, and what the tree
/// holds under it would never be found: take its bits (std::bit_cast<std::uint32_t>).
template <class T>
concept EqualToItself = std::equality_comparable<T> && !std::floating_point<T>;  // NaN != NaN

/// A copy that throws would leave half of a prompt in the tree. What owns memory does: take an
/// index into a table of them.
template <class T>
concept NothrowCopyable = std::copyable<T> && std::is_nothrow_copy_constructible_v<T> &&
                          std::is_nothrow_copy_assignable_v<T>;

}  // namespace detail
CHUNKATTN_NAMESPACE_END
