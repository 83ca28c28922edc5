// KvCompanion: what a component keeps of tokens beside the K/V of the tree's chunks, and that
// travels with it: by swap, to files and tiers, to another machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../plan_view.hpp"
#include "../tree_options.hpp"
#include "detail/slots.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Rows of a companion, in host memory: of each token that has one.
struct CompanionRows {
  std::string format;               ///< KvCompanion::format()
  std::size_t bytes_per_token = 0;  ///< of a row
  std::vector<TokenRange> ranges;   ///< positions that have rows, in order, none twice
  std::vector<std::byte> bytes;     ///< their rows, one after the other

  /// Adds the row of a position after those that there are. Returns where it is to be written;
  /// valid until the next call.
  [[nodiscard]] std::byte* add(std::int32_t position) {
    if (!ranges.empty() && ranges.back().end() == position)
      ++ranges.back().length;
    else
      ranges.push_back({position, 1});
    bytes.resize(bytes.size() + bytes_per_token);
    return bytes.data() + bytes.size() - bytes_per_token;
  }
  /// Calls f(position, first byte of its row) for each row.
  template <class F>
  void for_each(const F& f) const {
    const std::byte* row = bytes.data();
    for (const TokenRange& range : ranges)
      for (std::int32_t i = 0; i < range.length; ++i, row += bytes_per_token)
        f(range.begin + i, row);
  }
};

/// What a component keeps of tokens beside a tree's K/V, as rows of bytes: one for each token that
/// it has something of. swap_out(), resume() and Tiers take any number of them. Rows lie where K/V
/// lies, in slots of chunks of the tree; that is how a companion finds them.
///
/// Rows follow K/V: they are gathered while the tree has the tokens' K/V, and put back when it has
/// it again. PrefixTree's mark_loaded() comes first, since it says of K/V that what was kept of
/// these slots before is of no token any more.
///
/// \tparam Sequence  of the tree
template <class Sequence>
class KvCompanion {
 public:
  virtual ~KvCompanion() = default;

  /// What a row is: the component, its version, shape and types, in one text. Rows of another
  /// format are never read.
  [[nodiscard]] virtual std::string format() const = 0;
  /// Bytes of a row; always the same.
  [[nodiscard]] virtual std::size_t bytes_per_token() const = 0;

  /// Adds the rows of these tokens, whose K/V is in place: of each that has one. Others are left
  /// out.
  /// \param places  where they lie in the tree's chunks, in the order of their positions
  virtual void gather(std::span<const Piece> places, CompanionRows& rows) = 0;
  /// Puts rows back. Those that are there already stay.
  /// \param sequence  is in no step
  /// \param rows      of this format, of tokens whose K/V is in place: below num_written()
  virtual void scatter(Sequence& sequence, const CompanionRows& rows) = 0;

  /// Adds those of them that are worth storing below the tree, for other prompts.
  virtual void gather_lasting(std::span<const Piece> places, CompanionRows& rows) {
    gather(places, rows);
  }
  /// Of rows that are coming from there, in order, drops those without which a sequence can go on.
  virtual void trim(CompanionRows&) const {}

  /// Takes memory for rows that scatter() is to put back; the sequence keeps it until it leaves.
  /// False, with nothing changed but what was cached, if there is too little.
  [[nodiscard]] virtual bool reserve(Sequence&, const CompanionRows&) { return true; }
  /// The last position up to `limit` at which a sequence can go on with the rows that there are:
  /// `limit` where steps do not need them.
  [[nodiscard]] virtual std::size_t end(const Sequence&, std::size_t limit) const { return limit; }
  /// Whose rows travel with a sequence that goes on at a position which end() has returned.
  /// \param own  the tokens whose K/V travels: not those that other live sequences have, too
  [[nodiscard]] virtual TokenRange needed([[maybe_unused]] std::size_t position,
                                          TokenRange own) const {
    return own;
  }
  /// Rows were put back, and the sequence goes on at a position which end() has returned.
  virtual void resume(Sequence&, [[maybe_unused]] std::size_t position) {}

 protected:
  KvCompanion() = default;
  KvCompanion(const KvCompanion&) = default;
  KvCompanion& operator=(const KvCompanion&) = default;
};

/// Those that travel with a sequence, in an order that stays the same.
template <class Sequence>
using KvCompanions = std::vector<KvCompanion<Sequence>*>;

namespace detail {

/// Of rows that came from elsewhere: throws InvalidArgument unless they are the companion's, of
/// positions before `end`.
template <class Sequence>
void check_rows(const KvCompanion<Sequence>& companion, const CompanionRows& rows,
                std::size_t end) {
  check_argument(rows.format == companion.format(), "rows.format", rows.format.c_str(),
                 {"the companion's format(), ", companion.format().c_str()});
  check_argument(rows.bytes_per_token == companion.bytes_per_token(), "rows.bytes_per_token",
                 rows.bytes_per_token,
                 {"the companion's bytes_per_token(), ", companion.bytes_per_token()});
  std::int64_t next = 0;
  std::size_t count = 0;
  for (const TokenRange& range : rows.ranges) {
    check_argument(range.begin >= next && range.length > 0, "rows.ranges", range.begin,
                   "positions in order, none twice");
    next = std::int64_t{range.begin} + range.length;
    check_argument(next <= static_cast<std::int64_t>(end), "rows.ranges", next - 1,
                   {"positions of tokens whose K/V is in place, below ", end});
    count += to_size(range.length);
  }
  check_argument(rows.bytes.size() == count * rows.bytes_per_token, "rows.bytes.size()",
                 rows.bytes.size(),
                 {rows.bytes_per_token, " bytes for each of ", count, " tokens"});
}

/// Takes away the rows of positions from `end` on.
inline void cut_rows(CompanionRows& rows, std::size_t end) {
  std::size_t count = 0, kept = 0;
  for (; kept < rows.ranges.size() && to_size(rows.ranges[kept].begin) < end; ++kept) {
    TokenRange& range = rows.ranges[kept];
    range.length = static_cast<std::int32_t>((std::min)(to_size(range.end()), end)) - range.begin;
    count += to_size(range.length);
  }
  rows.ranges.resize(kept);
  rows.bytes.resize(count * rows.bytes_per_token);
}
/// Takes away the rows of positions before `begin`.
inline void drop_rows_before(CompanionRows& rows, std::int32_t begin) {
  std::size_t dropped = 0, count = 0;
  for (; dropped < rows.ranges.size() && rows.ranges[dropped].end() <= begin; ++dropped)
    count += to_size(rows.ranges[dropped].length);
  rows.ranges.erase(rows.ranges.begin(),
                    rows.ranges.begin() + static_cast<std::ptrdiff_t>(dropped));
  if (!rows.ranges.empty() && rows.ranges[0].begin < begin) {
    TokenRange& first = rows.ranges[0];
    count += to_size(begin - first.begin);
    first = {begin, first.end() - begin};
  }
  rows.bytes.erase(rows.bytes.begin(),
                   rows.bytes.begin() + static_cast<std::ptrdiff_t>(count * rows.bytes_per_token));
}
/// The last position up to `limit` at which all companions can go on.
template <class Sequence>
[[nodiscard]] std::size_t end_of_all(const KvCompanions<Sequence>& companions,
                                     const Sequence& sequence, std::size_t limit) {
  for (std::size_t last = limit + 1; limit != last;) {
    last = limit;
    for (const KvCompanion<Sequence>* one : companions) limit = one->end(sequence, limit);
  }
  return limit;
}
template <class Sequence>
void check_companions(const KvCompanions<Sequence>& companions) {
  for (const KvCompanion<Sequence>* one : companions)
    check_argument(one != nullptr, "companions", "null", "no null pointers");
}

template <class Sequence>
[[nodiscard]] CompanionRows no_rows_of(const KvCompanion<Sequence>& companion) {
  CompanionRows rows;
  rows.format = companion.format();
  rows.bytes_per_token = companion.bytes_per_token();
  return rows;
}
/// The companion's rows of a part of a path.
template <class Sequence, class Placed>
[[nodiscard]] CompanionRows rows_of(KvCompanion<Sequence>& companion, const Placed& placed,
                                    TokenRange range) {
  CompanionRows rows = no_rows_of(companion);
  std::vector<Piece> places;
  placed.for_each_run(range, [&](const Piece& piece) { places.push_back(piece); });
  companion.gather(places, rows);
  return rows;
}

/// Puts rows back of tokens whose K/V is in place, and lets the sequence go on after them.
template <class Sequence>
void put_back(Sequence& sequence, const std::vector<CompanionRows>& rows,
              const KvCompanions<Sequence>& companions) {
  const std::size_t written = sequence.num_written();
  for (std::size_t i = 0; i < companions.size(); ++i) {
    CompanionRows there = rows[i];
    cut_rows(there, written);
    companions[i]->scatter(sequence, there);
  }
  if (sequence.num_pending() > 0) return;
  const std::size_t next = end_of_all(companions, sequence, sequence.num_scheduled());
  for (KvCompanion<Sequence>* const one : companions) one->resume(sequence, next);
}

}  // namespace detail

/// The companion's rows of the positions `range` of a sequence: of those that have one.
/// \throws InvalidArgument for positions whose K/V is not in place
template <PlacedSequence Sequence>
[[nodiscard]] CompanionRows gather_rows(const Sequence& sequence, TokenRange range,
                                        std::type_identity_t<KvCompanion<Sequence>>& companion) {
  detail::check_written(sequence, range);
  return detail::rows_of(companion, sequence, range);
}

/// The reverse of gather_rows(), after Sequence::mark_loaded() of the K/V of these tokens.
/// \returns false, with nothing changed but what was cached, if the companion lacks memory
/// \throws InvalidArgument for rows of another format or shape, and for positions whose K/V is not
///         in place
template <PlacedSequence Sequence>
[[nodiscard]] bool scatter_rows(Sequence& sequence, const CompanionRows& rows,
                                std::type_identity_t<KvCompanion<Sequence>>& companion) {
  detail::check_rows(companion, rows, sequence.num_written());
  if (!companion.reserve(sequence, rows)) return false;
  companion.scatter(sequence, rows);
  return true;
}

CHUNKATTN_NAMESPACE_END
