// The rows of q, k, v and out of a call, whether they lie one behind the other or at distances of
// their own, and the checks of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "../../attention_options.hpp"
#include "../../head_rows.hpp"
#include "../kv/checks.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "qo_heads.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// What a caller gave: an array without gaps, or HeadRows.
template <class X>
struct GivenRows {
  using element_type = X;
  std::span<X> array{};
  HeadRows<X> rows{};
  bool has_strides = false;

  GivenRows() = default;
  explicit GivenRows(std::span<X> dense) noexcept : array(dense) {}
  explicit GivenRows(const HeadRows<X>& strided) noexcept : rows(strided), has_strides(true) {}
};

/// The same, to be read alone.
template <class X>
[[nodiscard]] GivenRows<const X> read_only(const GivenRows<X>& given) noexcept {
  if (!given.has_strides) return GivenRows<const X>(std::span<const X>(given.array));
  return GivenRows<const X>(rows_at<const X>(given.rows.data, given.rows));
}

template <class R>
inline constexpr bool is_rows = false;
template <class X>
inline constexpr bool is_rows<HeadRows<X>> = true;
template <class X>
inline constexpr bool is_rows<GivenRows<X>> = true;

template <class X>
[[nodiscard]] HeadRows<const void> untyped(const HeadRows<X>& rows) noexcept {
  return rows_at<const void>(rows.data, rows);
}
template <class X>
[[nodiscard]] HeadRows<X> rows_without_gaps(X* data, int num_tokens, int num_heads,
                                            int head_dim) noexcept {
  return {data, num_tokens, num_heads, head_dim, std::int64_t{num_heads} * head_dim, head_dim};
}

/// Checks that rows of elements of `width` bytes are memory of this shape, and apart.
/// \param heads_of  what says the number of heads
inline void check_rows(const char* name, const HeadRows<const void>& rows, std::size_t width,
                       int num_tokens, int num_heads, const char* heads_of, int head_dim) {
  const auto refuse = [name](const char* field, std::int64_t value, MessageParts expected) {
    fail_argument(joined({name, ".", field}), value, expected);
  };
  if (rows.num_tokens != num_tokens)
    refuse("num_tokens", rows.num_tokens, {"the plan's query tokens, ", num_tokens});
  if (rows.num_heads != num_heads) refuse("num_heads", rows.num_heads, {heads_of, ", ", num_heads});
  if (rows.head_dim != head_dim)
    refuse("head_dim", rows.head_dim, {"the size of the attention's heads there, ", head_dim});
  if (rows.data == nullptr) fail_argument(joined({name, ".data"}), "null", "memory");
  if (reinterpret_cast<std::uintptr_t>(rows.data) % width != 0)
    fail_argument(joined({name, ".data"}), "misaligned",
                  "an address that is a multiple of the element's size");
  const auto check = [&](const char* field, std::int64_t stride, std::int64_t count) {
    if (count == 1) return;
    if (stride < head_dim) refuse(field, stride, {"at least the row's ", head_dim, " elements"});
    if (stride > (std::int64_t{1} << 61) / static_cast<std::int64_t>(width) / count)
      refuse(field, stride, {"rows within the address space"});
  };
  check("stride_token", rows.stride_token, num_tokens);
  check("stride_head", rows.stride_head, num_heads);
  const std::int64_t of_token = (num_heads - 1) * rows.stride_head + head_dim;
  const std::int64_t of_head = (num_tokens - 1) * rows.stride_token + head_dim;
  if (num_tokens > 1 && num_heads > 1 && rows.stride_token < of_token && rows.stride_head < of_head)
    refuse("stride_token", rows.stride_token,
           {"rows that do not overlap: at least ", of_token, ", all heads of a token, or with a ",
            "stride_head of at least ", of_head, ", all tokens of a head"});
}

/// Checks that a buffer has the expected number of elements; `shape` names it in the message.
template <class T>
void check_size(const char* name, std::span<T> buffer, std::size_t expected, const char* shape) {
  if (buffer.size() != expected) [[unlikely]]
    fail_argument(joined({name, ".size()"}), buffer.size(), {shape, " = ", expected});
  if (buffer.data() == nullptr) [[unlikely]]
    fail_argument(joined({name, ".data()"}), "null", "memory");
  if (reinterpret_cast<std::uintptr_t>(buffer.data()) % sizeof(T) != 0) [[unlikely]]
    fail_argument(joined({name, ".data()"}), "misaligned",
                  "an address that is a multiple of the element's size");
}

/// The rows of k, v or out.
/// \param shape  names the number of elements in a message
template <class X>
[[nodiscard]] HeadRows<X> checked_rows(const char* name, const GivenRows<X>& given, int num_tokens,
                                       int num_heads, const char* heads_of, int head_dim,
                                       const char* shape) {
  if (given.has_strides) {
    check_rows(name, untyped(given.rows), sizeof(X), num_tokens, num_heads, heads_of, head_dim);
    return given.rows;
  }
  check_size(name, given.array,
             static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(num_heads) *
                 static_cast<std::size_t>(head_dim),
             shape);
  return rows_without_gaps(given.array.data(), num_tokens, num_heads, head_dim);
}

/// The rows of q, whose number of heads nothing else says.
template <class X>
[[nodiscard]] HeadRows<X> checked_queries(const GivenRows<X>& given, int num_tokens, int head_dim) {
  if (given.has_strides) {
    const int heads = given.rows.num_heads;
    check_argument(heads > 0 && heads <= max_qo_heads, "q.num_heads", heads,
                   {"1 to ", max_qo_heads});
    check_rows("q", untyped(given.rows), sizeof(X), num_tokens, heads, "", head_dim);
    return given.rows;
  }
  const int heads = count_qo_heads(given.array.size(), num_tokens, head_dim);
  check_size("q", given.array, given.array.size(), "");  // its memory
  return rows_without_gaps(given.array.data(), num_tokens, heads, head_dim);
}

/// Where checked rows lie, in bytes: groups of rows, none of which reaches into the next one.
struct RowPlaces {
  struct Axis {
    std::int64_t count, apart;
    friend bool operator==(const Axis&, const Axis&) = default;
  };
  std::uintptr_t begin;
  Axis outer, inner;
  std::int64_t row_bytes;
  bool heads_first = false;  ///< the outer axis is that of heads: the same rows in another order

  RowPlaces(const HeadRows<const void>& rows, std::size_t width) noexcept
      : begin(reinterpret_cast<std::uintptr_t>(rows.data)),
        outer(axis(rows.num_tokens, rows.stride_token, width)),
        inner(axis(rows.num_heads, rows.stride_head, width)),
        row_bytes(rows.head_dim * static_cast<std::int64_t>(width)) {
    if (outer.apart < inner.apart) {
      const Axis heads = inner;
      inner = outer;
      outer = heads;
      heads_first = true;
    }
  }
  friend bool operator==(const RowPlaces&, const RowPlaces&) = default;

  /// From the first byte to the last.
  [[nodiscard]] Bytes span() const noexcept {
    return {begin, begin + static_cast<std::uintptr_t>((outer.count - 1) * outer.apart + group())};
  }
  /// Whether a row has one of these bytes.
  [[nodiscard]] bool touches(Bytes bytes) const noexcept {
    return any(begin, outer, group(), bytes, [&](std::uintptr_t at) {
      return any(at, inner, row_bytes, bytes, [](std::uintptr_t) { return true; });
    });
  }
  /// Whether f(Bytes) says so of a row.
  template <class F>
  [[nodiscard]] bool any_row(const F& f) const {
    for (std::int64_t o = 0; o < outer.count; ++o)
      for (std::int64_t i = 0; i < inner.count; ++i) {
        const std::uintptr_t at =
            begin + static_cast<std::uintptr_t>(o * outer.apart + i * inner.apart);
        if (f(Bytes(at, at + static_cast<std::uintptr_t>(row_bytes)))) return true;
      }
    return false;
  }
  /// Whether a row of these has a byte of one of those.
  [[nodiscard]] bool touches(const RowPlaces& other) const noexcept {
    return span().touches(other.span()) && any_row([&](Bytes row) { return other.touches(row); });
  }

 private:
  static Axis axis(std::int64_t count, std::int64_t stride, std::size_t width) noexcept {
    return {count, count == 1 ? 0 : stride * static_cast<std::int64_t>(width)};
  }
  [[nodiscard]] std::int64_t group() const noexcept {
    return (inner.count - 1) * inner.apart + row_bytes;
  }
  // Whether f(start) says so of one of an axis' parts of `size` bytes that has one of these bytes.
  template <class F>
  static bool any(std::uintptr_t start, Axis axis, std::int64_t size, Bytes bytes, const F& f) {
    std::uintptr_t at = start;
    std::int64_t n = 0;
    if (axis.apart > 0 && bytes.begin > start) {  // those before end before
      n = static_cast<std::int64_t>(bytes.begin - start) / axis.apart;
      at += static_cast<std::uintptr_t>(n * axis.apart);
    }
    for (; n < axis.count && at < bytes.end; ++n, at += static_cast<std::uintptr_t>(axis.apart))
      if (at + static_cast<std::uintptr_t>(size) > bytes.begin && f(at)) return true;
    return false;
  }
};

/// check_outputs() of memory that has bytes in common from the first to the last.
CHUNKATTN_COLD inline void check_places(const RowPlaces& q, const RowPlaces& out,
                                        std::span<float> lse) {
  check_argument(q == out || !q.touches(out), "out", "memory of q",
                 "memory of its own, or q itself if it has as many bytes");
  if (lse.empty()) return;
  const Bytes of_lse(lse);
  check_argument(!q.touches(of_lse), "lse", "memory of q", "memory of its own");
  check_argument(!out.touches(of_lse), "lse", "memory of out", "memory of its own");
}

/// From the first byte to the last.
template <class X>
[[nodiscard]] Bytes extent(const HeadRows<X>& rows) noexcept {
  const X* const last = rows.row(rows.num_tokens - 1, rows.num_heads - 1);
  return {reinterpret_cast<std::uintptr_t>(rows.data),
          reinterpret_cast<std::uintptr_t>(last + rows.head_dim)};
}

/// Checks that `lse` is memory of its own and `out`, too, or the rows of q themselves: then what
/// writes a row has read it, and nothing else reads it.
template <class X, class Y>
void check_outputs(const HeadRows<X>& q, const HeadRows<Y>& out, std::span<float> lse) {
  const Bytes of_q = extent(q), of_out = extent(out), of_lse(lse);
  if (of_q.touches(of_out) || (!lse.empty() && (of_lse.touches(of_q) || of_lse.touches(of_out))))
      [[unlikely]]
    check_places(RowPlaces(untyped(q), sizeof(X)), RowPlaces(untyped(out), sizeof(Y)), lse);
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
