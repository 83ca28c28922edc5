// What the template parameters must offer.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "config.hpp"
#include "slot.hpp"

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

/// A token of a prompt: what is compared to find shared prefixes. Usually an integer id; a struct
/// may carry further identity (an image's id beside its placeholder token).
///
/// - It can be made without a value, and copying it never throws.
/// - `a == b`, where `a == a` always holds: not floating-point numbers, nor a struct whose == uses
///   them and may meet NaN (the compiler cannot see that). Equal tokens have equal std::hash.
/// - Neither == nor std::hash throws: the tree also calls them where nothing may fail.
template <class T>
concept TokenType = std::default_initializable<T> && detail::NothrowCopyable<T> &&
                    detail::EqualToItself<T> && requires(const T& token) {
                      { std::hash<T>{}(token) } -> std::convertible_to<std::size_t>;
                    };

/// Hands out slot indices. It knows nothing of K/V memory.
///
/// - `allocate()` returns a free index in [0, high_water()), or no_slot when the budget is spent.
///   It may throw; then nothing has changed. Another answer is refused by the tree's operation that
///   asked: InvalidArgument, which names the index, with nothing changed.
/// - `free(slot)` takes one back. noexcept; the caller frees each slot once.
/// - `capacity()`: the most slots that can be out at once; `max_slots` if there is no limit.
/// - `available()`: how many further calls of allocate() the budget allows.
/// - `high_water()`: one more than the largest index ever handed out. K/V memory must cover it.
template <class A>
concept ChunkAllocator = std::movable<A> && requires(A& a, const A& c, SlotIndex slot) {
  { a.allocate() } -> std::same_as<SlotIndex>;
  { a.free(slot) } noexcept;
  { c.capacity() } noexcept -> std::convertible_to<std::size_t>;
  { c.available() } noexcept -> std::convertible_to<std::size_t>;
  { c.high_water() } noexcept -> std::convertible_to<std::size_t>;
};

/// The largest budget: slot indices are 32-bit and signed.
inline constexpr std::size_t max_slots = 0x7fffffff;

/// Runs independent calls, on threads or not.
///
/// - `concurrency()`: how many calls may run at the same time (1 for a serial executor).
/// - `parallel_for(n, f)` calls f(i) once for each i in [0, n), in any order, and returns when all
///   have returned. Calls never wait for each other.
template <class E>
concept Executor = requires(E& e, void (*f)(int)) {
  { e.concurrency() } -> std::convertible_to<int>;
  e.parallel_for(1, f);
};

/// What K/V memory follows: PrefixTree.
///
/// - `chunk_size`: tokens per slot.
/// - `num_slots()`: slots handed out so far; `slot_source()`: the same for as long as one likes.
template <class T>
concept SlotOwner = requires(const T& tree) {
  { T::chunk_size } -> std::convertible_to<int>;
  { tree.num_slots() } -> std::convertible_to<std::size_t>;
  { tree.slot_source() } -> std::same_as<SlotSource>;
};

/// Where a sequence's tokens lie: Sequence.
///
/// - `size()` known tokens, behind them `num_reserved()` places; `num_scheduled()` are computed or
///   on their way.
/// - `for_each_run(range, f)` calls f(const Piece&) for the runs of path positions inside one slot.
template <class S>
concept PlacedSequence = requires(const S& sequence, void (*f)(const Piece&)) {
  { S::chunk_size } -> std::convertible_to<int>;
  { sequence.size() } -> std::convertible_to<std::size_t>;
  { sequence.num_reserved() } -> std::convertible_to<std::size_t>;
  { sequence.num_scheduled() } -> std::convertible_to<std::size_t>;
  sequence.for_each_run({0, 1}, f);
};

/// K and V memory of a model's layers: KvCache, or an engine's own.
///
/// - `layer(l)`: the KvView of layer l. `options()`: the KvCacheOptions, or what has its fields.
template <class C>
concept KvProvider = requires(C& cache, const C& constant) {
  cache.layer(0).k_row(SlotIndex{0}, 0, 0);
  { constant.options().num_layers } -> std::convertible_to<int>;
  { constant.options().num_kv_heads } -> std::convertible_to<int>;
  { constant.options().head_dim } -> std::convertible_to<int>;
};

CHUNKATTN_NAMESPACE_END
