#include "mask_forest.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace plugin {
namespace {

constexpr std::uint16_t minus_infinity = 0xfc00;

bool shows(std::uint16_t bits) noexcept {
  return (bits & 0x7fff) == 0;
}

/// The value of a 16-bit float.
float value_of(std::uint16_t bits) noexcept {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction == 0 ? std::numeric_limits<float>::infinity()
                                                     : std::numeric_limits<float>::quiet_NaN())
                     : exponent == 0
                         ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

/// Bits without a pattern (splitmix64).
std::uint64_t key_of(std::uint64_t number) noexcept {
  number = (number + 1) * 0x9e3779b97f4a7c15u;
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9u;
  number = (number ^ number >> 27) * 0x94d049bb133111ebu;
  return number ^ number >> 31;
}

// A set with at most so many cells, and of almost all rows of the segment above it, continues in
// that segment: what the other rows skip there costs less than a segment of its own.
constexpr int max_joined_cells = 64;
constexpr int max_left_rows = 63;

}  // namespace

bool MaskForest::update(const MaskView& mask) {
  if (valid_ && equals_last(mask)) return false;
  valid_ = false;
  clear(mask);
  if (mask.bits == nullptr) {
    for (int s = 0; s < mask.streams; ++s) add_plain_stream(mask, s, mask.cells);
  } else {
    for (int s = 0; s < mask.streams && !has_table_; ++s) has_table_ = !add_stream(mask, s);
    if (has_table_) add_tables(mask);
  }
  arrays_.pieces_version = ++arrays_.segments_version;
  remember(mask);
  return true;
}

bool MaskForest::equals_last(const MaskView& mask) const noexcept {
  if ((mask.bits == nullptr) != (last_.bits == nullptr) || mask.streams != last_.streams ||
      mask.rows != last_.rows || mask.cells != last_.cells ||
      (mask.stream_stride == 0) != (last_.stream_stride == 0))
    return false;
  if (mask.bits == nullptr) return true;
  const std::uint16_t* known = last_bits_.data();
  for (int s = 0; s < (mask.stream_stride == 0 ? 1 : mask.streams); ++s) {
    for (int r = 0; r < mask.rows; ++r, known += mask.cells)
      if (std::memcmp(known, mask.row(s, r).data(), mask.row(s, r).size_bytes()) != 0) return false;
  }
  return true;
}

void MaskForest::remember(const MaskView& mask) {
  last_ = mask;
  last_bits_.clear();
  if (mask.bits != nullptr)
    for (int s = 0; s < (mask.stream_stride == 0 ? 1 : mask.streams); ++s)
      for (int r = 0; r < mask.rows; ++r)
        last_bits_.insert(last_bits_.end(), mask.row(s, r).begin(), mask.row(s, r).end());
  valid_ = true;
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
  table_.reserve(static_cast<std::size_t>(mask.streams) * static_cast<std::size_t>(mask.rows) *
                 static_cast<std::size_t>(mask.cells));
  for (int s = 0; s < mask.streams; ++s) {
    int end = 0;  // of the cells that any row sees
    for (int r = 0; r < mask.rows; ++r) {
      const std::span<const std::uint16_t> bits = mask.row(s, r);
      int seen = mask.cells;
      while (seen > end && bits[static_cast<std::size_t>(seen) - 1] == minus_infinity) --seen;
      end = std::max(end, seen);
      for (const std::uint16_t each : bits) table_.push_back(value_of(each));
    }
    add_plain_stream(mask, s, end);
  }
}

// Adds segments, pieces and rows of one stream; false: its mask is no forest.
bool MaskForest::add_stream(const MaskView& mask, int stream) {
  if (!find_sets(mask, stream)) return false;
  find_rows(mask, stream);
  if (!find_parents(mask.rows)) return false;
  number_rows(stream, mask.rows);
  add_segments(stream);
  return true;
}

// Cells seen by the same rows become sets; false: the mask has other values than 0 and minus
// infinity. Sets are told apart by the sum of their rows' keys; find_parents() would notice if two
// had the same.
bool MaskForest::find_sets(const MaskView& mask, int stream) {
  signatures_.assign(static_cast<std::size_t>(mask.cells), 0);
  visible_.assign(static_cast<std::size_t>(mask.rows), 0);
  for (int r = 0; r < mask.rows; ++r) {
    const std::uint64_t key = key_of(static_cast<std::uint64_t>(r));
    const std::uint16_t* const bits = mask.row(stream, r).data();
    std::uint64_t* const signatures = signatures_.data();
    std::int32_t count = 0;
    std::int32_t other = 0;
    for (int c = 0; c < mask.cells; ++c) {
      const bool seen = shows(bits[c]);
      signatures[c] += seen ? key : 0;
      count += seen;
      other |= !seen && bits[c] != minus_infinity;
    }
    if (other != 0) return false;
    visible_[static_cast<std::size_t>(r)] = count;
  }

  runs_.clear();
  run_sets_.clear();
  sets_.clear();
  std::unordered_map<std::uint64_t, int> known;
  for (int c = 0; c < mask.cells;) {
    const std::uint64_t signature = signatures_[static_cast<std::size_t>(c)];
    const int begin = c;
    while (c < mask.cells && signatures_[static_cast<std::size_t>(c)] == signature) ++c;
    if (signature == 0) continue;  // no row sees it
    const auto [at, is_new] = known.try_emplace(signature, static_cast<int>(sets_.size()));
    if (is_new) sets_.push_back({});
    Set& set = sets_[static_cast<std::size_t>(at->second)];
    ++set.num_runs;
    set.cells += c - begin;
    runs_.push_back({begin, c - begin});
    run_sets_.push_back(at->second);
  }
  return true;
}

// Sorts runs by sets, and lists the rows of each set.
void MaskForest::find_rows(const MaskView& mask, int stream) {
  int first = 0;
  for (Set& set : sets_) {
    set.first_run = first;
    first += std::exchange(set.num_runs, 0);
  }
  sorted_runs_.resize(runs_.size());
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    Set& set = sets_[static_cast<std::size_t>(run_sets_[i])];
    sorted_runs_[static_cast<std::size_t>(set.first_run + set.num_runs++)] = runs_[i];
  }
  set_rows_.clear();
  for (Set& set : sets_) set.first_row = set.num_rows = 0;
  for (Set& set : sets_) {
    set.first_row = static_cast<int>(set_rows_.size());
    const int cell = sorted_runs_[static_cast<std::size_t>(set.first_run)].begin;
    const std::uint16_t* bits = mask.row(stream, 0).data() + cell;
    for (int r = 0; r < mask.rows; ++r, bits += mask.row_stride)
      if (shows(*bits)) set_rows_.push_back(r);
    set.num_rows = static_cast<int>(set_rows_.size()) - set.first_row;
  }
}

// From the sets of most rows to those of fewest: all rows of a set must have been seen last in one
// other set, which is its parent, or in none. Also counts each row's cells once more.
bool MaskForest::find_parents(int rows) {
  order_.resize(sets_.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto first_cell = [&](const Set& set) {
    return sorted_runs_[static_cast<std::size_t>(set.first_run)].begin;
  };
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    const Set& left = sets_[static_cast<std::size_t>(a)];
    const Set& right = sets_[static_cast<std::size_t>(b)];
    return left.num_rows != right.num_rows ? left.num_rows > right.num_rows
                                           : first_cell(left) < first_cell(right);
  });
  deepest_.assign(static_cast<std::size_t>(rows), -1);
  std::vector<std::int32_t>& left = visible_;
  for (const int s : order_) {
    Set& set = sets_[static_cast<std::size_t>(s)];
    const int* const members = set_rows_.data() + set.first_row;
    set.parent = deepest_[static_cast<std::size_t>(members[0])];
    for (int i = 0; i < set.num_rows; ++i) {
      const auto row = static_cast<std::size_t>(members[i]);
      if (deepest_[row] != set.parent) return false;
      deepest_[row] = s;
      left[row] -= set.cells;
    }
  }
  return std::all_of(left.begin(), left.end(), [](std::int32_t count) { return count == 0; });
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
  for (int r = 0; r < rows; ++r)
    if (deepest_[static_cast<std::size_t>(r)] < 0) give(r);  // sees nothing
  std::vector<int>& walk = roots;                            // a stack, the first root on top
  std::vector<int> ordered;
  while (!walk.empty()) {
    const int s = walk.back();
    walk.pop_back();
    ordered.push_back(s);
    const Set& set = sets_[static_cast<std::size_t>(s)];
    for (int i = 0; i < set.num_rows; ++i) {
      const int row = set_rows_[static_cast<std::size_t>(set.first_row + i)];
      if (deepest_[static_cast<std::size_t>(row)] == s) give(row);
    }
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
      int begin = std::numeric_limits<int>::max();
      for (int i = 0; i < set.num_rows; ++i)
        begin = std::min(begin, row_of_[static_cast<std::size_t>(
                                    set_rows_[static_cast<std::size_t>(set.first_row + i)])]);
      arrays_.segments.push_back({begin, begin + set.num_rows,
                                  static_cast<std::int32_t>(arrays_.pieces.size()), 0, position, 0,
                                  above == nullptr ? -1 : above->segment, set.num_rows});
    }
    auto& segment = arrays_.segments[static_cast<std::size_t>(set.segment)];
    add_pieces(stream, set, position);
    segment.num_pieces += set.num_runs;
    segment.length += set.cells;
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

void MaskForest::add_pieces(int stream, const Set& set, std::int32_t position) {
  for (int i = 0; i < set.num_runs; ++i) {
    const Run& run = sorted_runs_[static_cast<std::size_t>(set.first_run + i)];
    arrays_.pieces.push_back(
        {static_cast<chunkattn::ChunkIndex>(stream), run.begin, run.length, position});
    position += run.length;
  }
}

}  // namespace plugin
