// Concepts that a token type must satisfy, named so that compilers' messages explain them.
#pragma once

#include <concepts>
#include <type_traits>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Compared by ==. A floating-point number is not equal to itself if it is NaN, so the tree would
/// never find it: use its bits (std::bit_cast<std::uint32_t>).
template <class T>
concept EqualToItself = std::equality_comparable<T> && !std::floating_point<T>;  // NaN != NaN

/// Copying must not throw: it would leave half of a prompt in the tree. For types that own memory
/// use an index into a table of them.
template <class T>
concept NothrowCopyable = std::copyable<T> && std::is_nothrow_copy_constructible_v<T> &&
                          std::is_nothrow_copy_assignable_v<T>;

}  // namespace detail
CHUNKATTN_NAMESPACE_END
