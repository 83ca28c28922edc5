// From the page tables of a batch to the arrays of a plan: what leading pages sequences have in
// common becomes shared segments.
//
// A page is shared by sequences that have it, and the same pages before it, if it is full in each
// of them; a freed page (the null page) is a page as any other. So sequences form a forest. It is
// found group by group. The rows of a group agree in their next page; each is compared with the
// first of them, the leader. Sorted by how much they have in common with it, those that go on with
// the leader come first at every depth, and those that part from it at one depth are grouped anew
// by their next page. So each shared page is read once for each sequence.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../plan_view.hpp"
#include "page_rows.hpp"
#include "page_runs.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Versions of segments, different for all plans from page tables, and from those of plans from
/// trees, which count from 1.
inline std::uint64_t next_paged_version() noexcept {
  static std::atomic<std::uint64_t> last{std::uint64_t{1} << 63};
  return last.fetch_add(1, std::memory_order_relaxed);
}

/// The plan of one batch after another.
class PageForest {
 public:
  /// Makes the plan of a batch anew. If this throws, the object may only be rebuilt or destroyed.
  /// \throws InvalidArgument for a page that is not in the geometry
  void rebuild(const PageRows& batch, const PageGeometry& geometry) {
    const Array<PageRow>& rows = batch.list();
    rows_ = rows.data();
    geometry_ = geometry;
    known_.clear();
    owned_.clear();
    arrays_.segments.clear();
    arrays_.pieces.clear();
    order_.clear();
    for (std::size_t s = 0; s < rows.size(); ++s) order_.push_back(s);
    built_.assign(rows.size(), Built{});
    groups_.clear();
    groups_.push_back({0, static_cast<std::int32_t>(order_.size()), 0, -1});
    while (!groups_.empty()) {
      const Group group = groups_.back();
      groups_.pop_back();
      split(group);
    }
    number_rows();
    arrays_.writes.resize(arrays_.row_token.size());
    set_writes(batch);
    arrays_.chunk_size =
        geometry.joined ? geometry.num_pages * geometry.page_size : geometry.page_size;
    arrays_.segments_version = next_paged_version();
    ++arrays_.pieces_version;
  }

  /// Whether the plan of this batch differs from the one that is there in lengths alone, and in
  /// pages behind those that were there, for which there is room.
  /// \throws InvalidArgument for such a page that is not in the geometry
  [[nodiscard]] bool continues(const PageRows& batch) const {
    const Array<PageRow>& rows = batch.list();
    if (arrays_.segments_version == 0 || rows.size() != built_.size()) return false;
    // Of another batch most last pages are others, too: that is seen before all are compared.
    for (std::size_t s = 0; s < rows.size(); ++s)
      if (!ends_alike(rows[s], built_[s])) return false;
    for (std::size_t s = 0; s < rows.size(); ++s)
      for (std::int32_t i = built_[s].segment; i >= 0; i = arrays_.segments[to_size(i)].parent)
        if (!has_pages(rows[s], owned_[to_size(i)])) return false;
    for (std::size_t s = 0; s < rows.size(); ++s)
      if (built_[s].segment >= 0)
        check_pages(s, rows[s], end_of(owned_[to_size(built_[s].segment)]), rows[s].num_pages);
    return true;
  }

  /// Brings the plan up to date with a batch that continues it.
  void advance(const PageRows& batch) {
    const Array<PageRow>& rows = batch.list();
    bool pieces_changed = false;
    for (std::size_t s = 0; s < rows.size(); ++s) {
      const PageRow& row = rows[s];
      set_lengths(row, built_[s]);
      const std::int32_t segment = built_[s].segment;
      if (segment < 0) continue;
      Owned& owned = owned_[to_size(segment)];
      const std::int32_t added = row.num_pages - end_of(owned);
      if (added <= 0) continue;
      append_pages(arrays_.segments[to_size(segment)], owned, s, row, row.num_pages);
      owned.room -= added;
      pieces_changed = true;
    }
    if (pieces_changed) ++arrays_.pieces_version;
    set_writes(batch);
  }

  [[nodiscard]] PlanView view() const noexcept { return arrays_.view(); }

 private:
  /// Sequences [begin, end) of order_, whose first `depth` pages are those of the path to
  /// `segment`. What more they have in common is to be found.
  struct Group {
    std::int32_t begin, end, depth, segment;
  };
  /// The pages of a segment: [first_page, first_page + num_pages) of its sequences.
  struct Owned {
    std::int32_t first_page, num_pages;
    std::int32_t room;  // for so many pages more
    std::size_t known;  // where their ids begin in known_
  };
  /// What was built for a sequence.
  struct Built {
    std::int32_t num_queries = 0;
    std::int32_t first_row = 0;
    std::int32_t segment = -1;  // the last of its path
  };

  static constexpr std::uint32_t no_page = 0xffffffff;

  static std::int32_t end_of(const Owned& owned) noexcept {
    return owned.first_page + owned.num_pages;
  }
  static std::int64_t end_of(const Piece& piece) noexcept {
    return std::int64_t{piece.begin} + piece.length;
  }

  // order_: a sequence, and above it what it is sorted by.
  static std::uint64_t entry_of(std::uint32_t key, std::size_t sequence) noexcept {
    return std::uint64_t{key} << 32 | sequence;
  }
  static std::uint32_t key_of(std::uint64_t entry) noexcept {
    return static_cast<std::uint32_t>(entry >> 32);
  }
  [[nodiscard]] std::size_t sequence_at(std::int32_t i) const noexcept {
    return static_cast<std::uint32_t>(order_[to_size(i)]);
  }
  void sort(std::int32_t begin, std::int32_t end) {
    if (!std::is_sorted(order_.begin() + begin, order_.begin() + end))
      std::sort(order_.begin() + begin, order_.begin() + end);
  }

  // Parts a group by the next page, if that may be shared.
  void split(const Group& group) {
    for (std::int32_t i = group.begin; i < group.end; ++i) {
      const std::size_t s = sequence_at(i);
      const bool may_share = rows_[s].full_pages > group.depth;
      order_[to_size(i)] = entry_of(
          may_share ? static_cast<std::uint32_t>(rows_[s].pages[group.depth]) : no_page, s);
    }
    sort(group.begin, group.end);
    for (std::int32_t begin = group.begin, end = 0; begin < group.end; begin = end) {
      const std::uint32_t page = key_of(order_[to_size(begin)]);
      end = begin + 1;
      while (page != no_page && end < group.end && key_of(order_[to_size(end)]) == page) ++end;
      if (end - begin > 1)
        share({begin, end, group.depth, group.segment});
      else
        add_own(begin, group.depth, group.segment);
    }
  }

  // Adds the segments along the path of the group's leader, and what is the leader's own.
  void share(const Group& group) {
    const std::size_t leader = sequence_at(group.begin);
    const PageRow& first = rows_[leader];
    for (std::int32_t i = group.begin + 1; i < group.end; ++i) {
      const PageRow& row = rows_[sequence_at(i)];
      const std::int32_t common =
          group.depth + equal_pages(first.pages + group.depth, row.pages + group.depth,
                                    (std::min)(first.full_pages, row.full_pages) - group.depth);
      order_[to_size(i)] = entry_of(~static_cast<std::uint32_t>(common), sequence_at(i));
    }
    sort(group.begin + 1, group.end);
    Group left = group;
    while (left.end - left.begin > 1) {
      const std::int32_t common = common_at(left.end - 1);
      left.segment = add_segment(leader, left.depth, common, left);
      left.depth = common;
      std::int32_t parting = left.end - 1;
      while (parting - 1 > left.begin && common_at(parting - 1) == common) --parting;
      groups_.push_back({parting, left.end, common, left.segment});
      left.end = parting;
    }
    add_own(left.begin, left.depth, left.segment);
  }
  [[nodiscard]] std::int32_t common_at(std::int32_t i) const noexcept {
    return static_cast<std::int32_t>(~key_of(order_[to_size(i)]));
  }

  // Adds the segment of what a sequence has alone, if there is something.
  void add_own(std::int32_t i, std::int32_t depth, std::int32_t parent) {
    const std::size_t s = sequence_at(i);
    built_[s].segment = rows_[s].num_pages == depth
                            ? parent
                            : add_segment(s, depth, rows_[s].num_pages, {i, i + 1, 0, parent});
  }

  // A segment of the pages [from, to) of a sequence, for a group whose `segment` is the parent.
  std::int32_t add_segment(std::size_t sequence, std::int32_t from, std::int32_t to,
                           const Group& group) {
    Segment segment{};
    segment.row_begin = group.begin;  // number_rows() makes rows of these
    segment.row_end = group.end;
    segment.piece_begin = static_cast<std::int32_t>(arrays_.pieces.size());
    segment.position = from * geometry_.page_size;
    segment.parent = group.segment;
    segment.num_sequences = group.end - group.begin;
    Owned owned{from, 0, 0, known_.size()};
    // What is private grows: by 64 tokens, until all is built anew.
    owned.room = segment.num_sequences > 1 ? 0 : (std::max)(2, 64 / geometry_.page_size);
    make_room(known_, to - from + owned.room);
    make_room(arrays_.pieces, to - from + owned.room);
    append_pages(segment, owned, sequence, rows_[sequence], to);
    known_.take(to_size(owned.num_pages));
    known_.resize(known_.size() + to_size(owned.room));
    arrays_.pieces.take(to_size(segment.num_pieces));
    arrays_.pieces.resize(arrays_.pieces.size() + to_size(owned.room));
    arrays_.segments.push_back(segment);
    owned_.push_back(owned);
    return static_cast<std::int32_t>(owned_.size()) - 1;
  }
  template <class T>
  static void make_room(Array<T>& array, std::int32_t count) {
    const std::size_t needed = array.size() + to_size(count);
    if (needed > array.capacity()) array.reserve((std::max)(needed, 2 * array.capacity()));
  }

  // Adds the pages up to `to` of a sequence to its segment, which has room.
  void append_pages(Segment& segment, Owned& owned, std::size_t sequence, const PageRow& row,
                    std::int32_t to) {
    const std::int32_t from = end_of(owned);
    std::memcpy(known_.data() + owned.known + owned.num_pages, row.pages + from,
                to_size(to - from) * sizeof(std::int32_t));
    Piece* const first = arrays_.pieces.data() + segment.piece_begin;
    Piece* const next = first + segment.num_pieces;
    if (!geometry_.joined) check_pages(sequence, row, from, to);
    Piece* const end = geometry_.joined ? append_runs(first, next, sequence, row, from, to)
                                        : append_each(next, row.pages, from, to);
    segment.num_pieces = static_cast<std::int32_t>(end - first);
    segment.length += (to - from) * geometry_.page_size;
    owned.num_pages += to - from;
  }
  // A piece for each page, from `next` on; returns the end of the pieces.
  Piece* append_each(Piece* next, const std::int32_t* pages, std::int32_t from,
                     std::int32_t to) const noexcept {
    const std::int32_t page_size = geometry_.page_size;
    for (std::int32_t p = from; p < to; ++p) *next++ = {pages[p], 0, page_size, p * page_size};
    return next;
  }
  // A piece for each run of consecutive pages; the first one may make the last piece longer.
  Piece* append_runs(const Piece* first, Piece* next, std::size_t sequence, const PageRow& row,
                     std::int32_t from, std::int32_t to) const {
    // Copies, so that compilers see that no piece that is stored changes them.
    const std::int32_t* const pages = row.pages;
    const std::int32_t page_size = geometry_.page_size, last = geometry_.num_pages - 1;
    std::uint32_t found = 0;  // has the sign bit if a page is not in the geometry
    Piece run{};
    const auto add = [&](std::int32_t p, bool begins) CHUNKATTN_LAMBDA {
      found |= outside(pages[p], last);
      const auto at = static_cast<std::uint32_t>(pages[p]) * static_cast<std::uint32_t>(page_size);
      run.begin = begins ? static_cast<std::int32_t>(at) : run.begin;
      run.position = begins ? p * page_size : run.position;
      run.length = (p + 1) * page_size - run.position;
      next += begins ? 1 : 0;
      next[-1] = run;
    };
    std::int32_t p = from;
    if (next == first)
      add(p++, true);
    else
      run = next[-1];
    while (p < to) {
      while (to - p >= page_block && block_goes_on(pages + p)) p += page_block;
      add(p - 1, false);  // for all of these
      // Where runs end cannot be foretold: no branch depends on it.
      for (const std::int32_t end = (std::min)(p + page_block, to); p < end; ++p)
        add(p, gap_before(pages + p) != 0);
    }
    if ((found & sign_bit) != 0) [[unlikely]]
      check_pages(sequence, row, from, to);
    return next;
  }

  void check_pages(std::size_t sequence, const PageRow& row, std::int32_t from,
                   std::int32_t to) const {
    const std::int32_t at =
        from + find_outside(row.pages + from, to - from, geometry_.num_pages - 1);
    if (at < to) [[unlikely]]
      fail_argument(joined({"page ", at, " of sequence ", sequence}), row.pages[at],
                    {"from 0 to ", geometry_.num_pages - 1, ", one of num_pages"});
  }

  // Rows in the order of sequences, in which those of each segment are consecutive.
  void number_rows() {
    first_rows_.clear();
    std::int32_t num_rows = 0;
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(order_.size()); ++i) {
      first_rows_.push_back(num_rows);
      num_rows += rows_[sequence_at(i)].num_queries;
    }
    first_rows_.push_back(num_rows);
    for (Segment& segment : arrays_.segments) {
      segment.row_begin = first_rows_[to_size(segment.row_begin)];
      segment.row_end = first_rows_[to_size(segment.row_end)];
    }
    arrays_.row_token.resize(to_size(num_rows));
    arrays_.row_kv_len.resize(to_size(num_rows));
    arrays_.row_segment.resize(to_size(num_rows));
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(order_.size()); ++i) {
      const std::size_t s = sequence_at(i);
      built_[s].num_queries = rows_[s].num_queries;
      built_[s].first_row = first_rows_[to_size(i)];
      for (std::int32_t q = 0; q < rows_[s].num_queries; ++q) {
        const std::size_t row = to_size(built_[s].first_row + q);
        arrays_.row_token[row] = rows_[s].first_token + q;
        arrays_.row_segment[row] = built_[s].segment;
      }
      set_lengths(rows_[s], built_[s]);
    }
  }
  // Each query token sees the positions up to its own; padding sees none.
  void set_lengths(const PageRow& row, const Built& built) noexcept {
    const std::int32_t before = row.seq_len - row.num_queries;
    for (std::int32_t q = 0; q < row.num_queries; ++q)
      arrays_.row_kv_len[to_size(built.first_row + q)] = (std::max)(0, before + q + 1);
  }

  // Whether a sequence may still end in the segment that was built for it: a shared one has no room
  // for more, its own has some, and may have pages that are not in use.
  [[nodiscard]] bool ends_alike(const PageRow& row, const Built& built) const noexcept {
    if (row.num_queries != built.num_queries) return false;
    if (built.segment < 0) return row.num_pages == 0;
    const Owned& last = owned_[to_size(built.segment)];
    if (arrays_.segments[to_size(built.segment)].num_sequences > 1)
      return row.full_pages == end_of(last) && row.num_pages == end_of(last);
    const std::int32_t count = (std::min)(row.num_pages, end_of(last)) - last.first_page;
    return count > 0 && row.num_pages - end_of(last) <= last.room &&
           row.pages[last.first_page + count - 1] == known_[last.known + to_size(count - 1)];
  }
  // Whether a sequence, as far as it goes, has the pages of a segment.
  [[nodiscard]] bool has_pages(const PageRow& row, const Owned& owned) const noexcept {
    const std::int32_t count = (std::min)(row.num_pages, end_of(owned)) - owned.first_page;
    return std::memcmp(known_.data() + owned.known, row.pages + owned.first_page,
                       to_size(count) * sizeof(std::int32_t)) == 0;
  }

  // Where the K/V of the query tokens goes: to the caller's slots, else to their positions.
  void set_writes(const PageRows& batch) noexcept {
    const std::int64_t* const slots = batch.slots();
    if (slots != nullptr) {
      for (std::size_t i = 0; i < arrays_.writes.size(); ++i)
        arrays_.writes[i] = slots[i] < 0 ? WriteTarget{no_chunk, 0} : target_of(slots[i]);
      return;
    }
    for (const PageRow& row : batch.list()) {
      for (std::int32_t i = 0; i < row.num_queries; ++i) {
        const std::int32_t position = row.seq_len - row.num_queries + i;
        WriteTarget& target = arrays_.writes[to_size(row.first_token + i)];
        target = {no_chunk, 0};
        if (position < 0) continue;  // padding
        const std::int32_t page = row.pages[position / geometry_.page_size];
        if (page != geometry_.null_page)
          target =
              target_of(std::int64_t{page} * geometry_.page_size + position % geometry_.page_size);
      }
    }
  }

  [[nodiscard]] WriteTarget target_of(std::int64_t slot) const noexcept {
    if (geometry_.joined) return {0, static_cast<std::int32_t>(slot)};
    return {static_cast<ChunkIndex>(slot / geometry_.page_size),
            static_cast<std::int32_t>(slot % geometry_.page_size)};
  }

  PageGeometry geometry_;
  PlanArrays arrays_;
  Array<Owned> owned_;         // by segment
  Array<std::int32_t> known_;  // page ids of segments, with room behind those that are private
  Array<Built> built_;         // by sequence

  // While it is rebuilt.
  const PageRow* rows_ = nullptr;
  Array<std::uint64_t> order_;
  Array<Group> groups_;
  Array<std::int32_t> first_rows_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
