#include "mask_forest.hpp"

#include <algorithm>
#include <bit>
#include <chunkattn/element.hpp>
#include <numeric>
#include <utility>

namespace plugin {
namespace {

constexpr std::uint16_t minus_infinity = 0xfc00;

bool shows(std::uint16_t bits) noexcept {
  return (bits & 0x7fff) == 0;
}

/// Calls found(cell) where a row begins or ceases to see cells, in their order. False: the row has
/// other values than 0 and minus infinity.
template <class F>
bool find_changes(std::span<const std::uint16_t> row, F&& found) {
  constexpr std::size_t block = 64;  // without a change as a rule: some vectors that are compared
  bool seen = false;
  for (std::size_t begin = 0; begin < row.size(); begin += block) {
    const std::span<const std::uint16_t> cells =
        row.subspan(begin, std::min(block, row.size() - begin));
    const std::uint16_t expected = seen ? 0 : minus_infinity;
    const std::uint16_t care = seen ? 0x7fff : 0xffff;
    std::uint16_t other = 0;
    for (const std::uint16_t bits : cells)
      other = static_cast<std::uint16_t>(other | ((bits ^ expected) & care));
    if (other == 0) continue;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const bool shown = shows(cells[i]);
      if (!shown && cells[i] != minus_infinity) return false;
      if (shown != seen) found(static_cast<std::int32_t>(begin + i));
      seen = shown;
    }
  }
  if (seen) found(static_cast<std::int32_t>(row.size()));
  return true;
}

std::size_t hash_of(std::span<const std::uint64_t> words) noexcept {
  std::uint64_t hash = 0;
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return static_cast<std::size_t>(hash);
}

// A set with at most so many cells, and of almost all rows of the segment above it, continues in
// that segment: what the other rows skip there costs less than a segment of its own.
constexpr int max_joined_cells = 64;
constexpr int max_left_rows = 63;

}  // namespace

void MaskForest::build(const MaskView& mask) {
  clear(mask);
  if (mask.bits == nullptr) {
    for (int s = 0; s < mask.streams; ++s) add_plain_stream(mask, s, mask.cells);
  } else {
    for (int s = 0; s < mask.streams && !has_table_; ++s) has_table_ = !add_stream(mask, s);
    if (has_table_) add_tables(mask);
  }
  arrays_.pieces_version = ++arrays_.segments_version;
}

void MaskForest::clear(const MaskView& mask) {
  const auto rows = static_cast<std::size_t>(mask.streams) * static_cast<std::size_t>(mask.rows);
  arrays_.segments.clear();
  arrays_.pieces.clear();
  arrays_.chunk_size = mask.cells;
  arrays_.row_token.assign(rows, 0);
  arrays_.row_kv_len.assign(rows, 0);
  arrays_.row_segment.assign(rows, -1);
  arrays_.writes.assign(rows, {chunkattn::no_chunk, 0});
  has_table_ = false;
  table_.clear();
}

// One segment of all rows over the first cells.
void MaskForest::add_plain_stream(const MaskView& mask, int stream, int cells) {
  const int first = stream * mask.rows;
  const auto piece = static_cast<std::int32_t>(arrays_.pieces.size());
  const auto segment = static_cast<std::int32_t>(arrays_.segments.size());
  for (int row = first; row < first + mask.rows; ++row) {
    const auto at = static_cast<std::size_t>(row);
    arrays_.row_token[at] = row;
    arrays_.row_kv_len[at] = cells;
    arrays_.row_segment[at] = cells > 0 ? segment : -1;
  }
  if (cells == 0) return;
  arrays_.segments.push_back({first, first + mask.rows, piece, 1, 0, cells, -1, mask.rows});
  arrays_.pieces.push_back({static_cast<chunkattn::ChunkIndex>(stream), 0, cells, 0});
}

// The mask as numbers, and a plan of what any row sees.
void MaskForest::add_tables(const MaskView& mask) {
  clear(mask);
  has_table_ = true;
  table_.resize(static_cast<std::size_t>(mask.streams) * static_cast<std::size_t>(mask.rows) *
                static_cast<std::size_t>(mask.cells));
  float* to = table_.data();
  std::uint16_t last = 0;  // of which `value` is: most are as the one before
  float value = 0;
  for (int s = 0; s < mask.streams; ++s) {
    int end = 0;  // of the cells that any row sees
    for (int r = 0; r < mask.rows; ++r) {
      const std::span<const std::uint16_t> bits = mask.row(s, r);
      int seen = mask.cells;
      while (seen > end && bits[static_cast<std::size_t>(seen) - 1] == minus_infinity) --seen;
      end = std::max(end, seen);
      for (const std::uint16_t each : bits) {
        if (each != last) value = to_float(chunkattn::half{last = each});
        *to++ = value;
      }
    }
    add_plain_stream(mask, s, end);
  }
}

// Adds segments, pieces and rows of one stream; false: its mask is no forest.
bool MaskForest::add_stream(const MaskView& mask, int stream) {
  if (!find_runs(mask, stream)) return false;
  find_members(mask.rows);
  find_sets();
  sort_runs();
  if (!find_parents(mask.rows)) return false;
  number_rows(stream, mask.rows);
  add_segments(stream);
  return true;
}

// Runs of cells at whose ends some row changes; false: the mask has other values than 0 and minus
// infinity. This alone reads the mask: all else takes time by runs and rows.
bool MaskForest::find_runs(const MaskView& mask, int stream) {
  changes_.clear();
  run_of_.assign(static_cast<std::size_t>(mask.cells) + 1, 0);
  for (int r = 0; r < mask.rows; ++r) {
    const bool good = find_changes(mask.row(stream, r), [&](std::int32_t cell) {
      changes_.push_back({cell, r});
      run_of_[static_cast<std::size_t>(cell)] = 1;
    });
    if (!good) return false;
  }
  runs_.clear();
  for (int c = 0; c <= mask.cells; ++c) {
    int& run = run_of_[static_cast<std::size_t>(c)];
    if (run != 0) {
      if (!runs_.empty()) runs_.back().length = c - runs_.back().begin;
      runs_.push_back({c, 0});
    }
    run = static_cast<int>(runs_.size()) - 1;
  }
  if (!runs_.empty()) runs_.back().length = mask.cells - runs_.back().begin;
  return true;
}

// The rows of each run: those of the run before it, but for the rows that change in between.
void MaskForest::find_members(int rows) {
  words_ = (static_cast<std::size_t>(rows) + 63) / 64;
  members_.assign(runs_.size() * words_, 0);
  for (const Change& change : changes_)
    members_of(run_of_[static_cast<std::size_t>(change.cell)])[static_cast<std::size_t>(
        change.row / 64)] ^= std::uint64_t{1} << change.row % 64;
  for (std::size_t i = words_; i < members_.size(); ++i) members_[i] ^= members_[i - words_];
}

// Runs that the same rows see become a set.
void MaskForest::find_sets() {
  sets_.clear();
  known_.assign(std::bit_ceil(2 * runs_.size() + 1), -1);
  for (int r = 0; r < static_cast<int>(runs_.size()); ++r) {
    const std::span<const std::uint64_t> members = members_of(r);
    int num_rows = 0;
    for (const std::uint64_t word : members) num_rows += std::popcount(word);
    if (num_rows == 0) continue;  // no row sees it
    std::size_t at = hash_of(members) & (known_.size() - 1);
    while (known_[at] >= 0 &&
           !std::ranges::equal(members,
                               members_of(sets_[static_cast<std::size_t>(known_[at])].example)))
      at = (at + 1) & (known_.size() - 1);
    if (known_[at] < 0) {
      known_[at] = static_cast<int>(sets_.size());
      sets_.push_back({r, num_rows});
    }
    Run& run = runs_[static_cast<std::size_t>(r)];
    run.set = known_[at];
    Set& set = sets_[static_cast<std::size_t>(run.set)];
    ++set.num_runs;
    set.cells += run.length;
  }
}

// Sorts runs by sets.
void MaskForest::sort_runs() {
  int first = 0;
  for (Set& set : sets_) {
    set.first_run = first;
    first += std::exchange(set.num_runs, 0);
  }
  sorted_runs_.resize(static_cast<std::size_t>(first));
  for (const Run& run : runs_) {
    if (run.set < 0) continue;
    Set& set = sets_[static_cast<std::size_t>(run.set)];
    sorted_runs_[static_cast<std::size_t>(set.first_run + set.num_runs++)] = run;
  }
}

// Orders sets from those of most rows to those of fewest, and finds the parents from the last to
// the first: the rows of a set must be those of whole sets that have no parent yet, which become
// its children, and rows that are in none.
bool MaskForest::find_parents(int rows) {
  order_.resize(sets_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    const Set& left = sets_[static_cast<std::size_t>(a)];
    const Set& right = sets_[static_cast<std::size_t>(b)];
    return left.num_rows != right.num_rows ? left.num_rows > right.num_rows
                                           : left.example < right.example;
  });
  deepest_.assign(static_cast<std::size_t>(rows), -1);
  // Leaders: the first row of each set without a parent, and the rows that are in none.
  std::vector<std::uint64_t> leaders(words_, ~std::uint64_t{0}), found(words_);
  std::vector<int> led(static_cast<std::size_t>(rows), -1);  // by leader: its set
  for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
    const std::span<const std::uint64_t> members =
        members_of(sets_[static_cast<std::size_t>(*at)].example);
    std::fill(found.begin(), found.end(), 0);
    std::size_t first = words_ * 64;
    for (std::size_t word = 0; word < words_; ++word) {
      for (std::uint64_t left = members[word] & leaders[word]; left != 0; left &= left - 1) {
        const std::size_t row = word * 64 + static_cast<std::size_t>(std::countr_zero(left));
        first = std::min(first, row);
        if (led[row] < 0) {
          deepest_[row] = *at;
          found[word] |= left & -left;
          continue;
        }
        Set& child = sets_[static_cast<std::size_t>(led[row])];
        child.parent = *at;
        const std::span<const std::uint64_t> its = members_of(child.example);
        for (std::size_t i = 0; i < words_; ++i) found[i] |= its[i];
      }
      leaders[word] &= ~members[word];
    }
    if (!std::ranges::equal(found, members)) return false;
    led[first] = *at;
    leaders[first / 64] |= std::uint64_t{1} << first % 64;
  }
  return true;
}

// Numbers the rows of a stream so that those of any set are consecutive, and those that end in it
// come before the others. Paths are compared set by set, those before in order_ first.
void MaskForest::number_rows(int stream, int rows) {
  // From the last of order_ to the first, so that each set's rows are kept together by a stable
  // partition of its parent's: the same as a walk depth-first.
  std::vector<int>& first_child = children_;
  first_child.assign(sets_.size(), -1);
  std::vector<int> next(sets_.size(), -1), roots;
  for (auto at = order_.rbegin(); at != order_.rend(); ++at) {
    const int parent = sets_[static_cast<std::size_t>(*at)].parent;
    if (parent < 0) {
      roots.push_back(*at);
    } else {
      next[static_cast<std::size_t>(*at)] = first_child[static_cast<std::size_t>(parent)];
      first_child[static_cast<std::size_t>(parent)] = *at;
    }
  }
  row_of_.assign(static_cast<std::size_t>(rows), 0);
  int number = stream * rows;
  const auto give = [&](int row) {
    arrays_.row_token[static_cast<std::size_t>(number)] = stream * rows + row;
    row_of_[static_cast<std::size_t>(row)] = number++;
  };
  std::vector<int> first_row(sets_.size(), -1), next_row(static_cast<std::size_t>(rows), -1);
  for (int r = rows - 1; r >= 0; --r)
    if (const int s = deepest_[static_cast<std::size_t>(r)]; s >= 0)
      next_row[static_cast<std::size_t>(r)] =
          std::exchange(first_row[static_cast<std::size_t>(s)], r);
  for (int r = 0; r < rows; ++r)
    if (deepest_[static_cast<std::size_t>(r)] < 0) give(r);  // sees nothing
  std::vector<int>& walk = roots;                            // a stack, the first root on top
  std::vector<int> ordered;
  while (!walk.empty()) {
    const int s = walk.back();
    walk.pop_back();
    ordered.push_back(s);
    sets_[static_cast<std::size_t>(s)].first_row = number;
    for (int r = first_row[static_cast<std::size_t>(s)]; r >= 0;
         r = next_row[static_cast<std::size_t>(r)])
      give(r);
    const auto from = walk.size();
    for (int c = first_child[static_cast<std::size_t>(s)]; c >= 0;
         c = next[static_cast<std::size_t>(c)])
      walk.push_back(c);
    std::reverse(walk.begin() + static_cast<std::ptrdiff_t>(from), walk.end());
  }
  order_.swap(ordered);  // depth-first: parents before children still
}

void MaskForest::add_segments(int stream) {
  std::vector<int>& num_children = children_;
  num_children.assign(sets_.size(), 0);
  for (const Set& set : sets_)
    if (set.parent >= 0) ++num_children[static_cast<std::size_t>(set.parent)];
  for (const int s : order_) {
    Set& set = sets_[static_cast<std::size_t>(s)];
    const Set* const above =
        set.parent < 0 ? nullptr : &sets_[static_cast<std::size_t>(set.parent)];
    const std::int32_t position = above == nullptr ? 0 : above->end;
    if (above != nullptr && num_children[static_cast<std::size_t>(set.parent)] == 1 &&
        set.cells <= max_joined_cells) {
      const auto& joined = arrays_.segments[static_cast<std::size_t>(above->segment)];
      if (joined.row_end - joined.row_begin - set.num_rows <= max_left_rows)
        set.segment = above->segment;
    }
    if (set.segment < 0) {
      set.segment = static_cast<int>(arrays_.segments.size());
      arrays_.segments.push_back({set.first_row, set.first_row + set.num_rows,
                                  static_cast<std::int32_t>(arrays_.pieces.size()), 0, position, 0,
                                  above == nullptr ? -1 : above->segment, set.num_rows});
    }
    add_pieces(stream, set, arrays_.segments[static_cast<std::size_t>(set.segment)]);
    set.end = position + set.cells;
  }
  for (std::size_t r = 0; r < deepest_.size(); ++r) {
    if (deepest_[r] < 0) continue;
    const Set& set = sets_[static_cast<std::size_t>(deepest_[r])];
    const auto row = static_cast<std::size_t>(row_of_[r]);
    arrays_.row_segment[row] = set.segment;
    arrays_.row_kv_len[row] = set.end;
  }
}

// The cells of a set, at the end of a segment: what adjoins its last piece lengthens that.
void MaskForest::add_pieces(int stream, const Set& set, chunkattn::PlanView::Segment& segment) {
  for (int i = 0; i < set.num_runs; ++i) {
    const Run& run = sorted_runs_[static_cast<std::size_t>(set.first_run + i)];
    if (segment.num_pieces > 0 &&
        arrays_.pieces.back().begin + arrays_.pieces.back().length == run.begin) {
      arrays_.pieces.back().length += run.length;
    } else {
      arrays_.pieces.push_back({static_cast<chunkattn::ChunkIndex>(stream), run.begin, run.length,
                                segment.position + segment.length});
      ++segment.num_pieces;
    }
    segment.length += run.length;
  }
}

}  // namespace plugin
