// TierCompanions: what Tiers stores and loads of a tree's companions, on the tree's thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../plan_view.hpp"
#include "../../transfer/companion.hpp"
#include "../../tree_options.hpp"
#include "../tier_store.hpp"
#include "known.hpp"
#include "rows.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

template <class Sequence>
class TierCompanions {
 public:
  TierCompanions(KvCompanions<Sequence> all, std::int32_t block) : all_(std::move(all)) {
    check_companions(all_);
    shapes_.block = to_size(block);
    for (const auto* const one : all_) {
      shapes_.widths.push_back(one->bytes_per_token());
      formats_.push_back(one->format());
    }
  }
  [[nodiscard]] const TierRowShapes& shapes() const noexcept { return shapes_; }
  /// What a record says of its rows.
  [[nodiscard]] const std::vector<std::string>& formats() const noexcept { return formats_; }

  // ---- offload ------------------------------------------------------------------------------

  /// Whether a block that is stored may have more rows now: it had none.
  [[nodiscard]] bool is_bare(const TierStore::Key& key) const { return bare_.has(key); }
  /// Adds the rows of a block. False: there are none.
  bool add_rows(std::span<const Piece> places, std::int32_t begin,
                std::vector<std::byte>& to) const {
    bool has_rows = false;
    for (auto* const one : all_) {
      CompanionRows rows = no_rows_of(*one);
      one->gather_lasting(places, rows);
      has_rows = has_rows || !rows.ranges.empty();
      put_tier_rows(shapes_, rows, begin, to);
    }
    return has_rows;
  }
  /// A block is stored with rows, or without.
  void note(const TierStore::Key& key, bool has_rows) {
    if (has_rows)
      bare_.remove(key);
    else if (!all_.empty())
      bare_.add(key);
  }

  // ---- load ---------------------------------------------------------------------------------

  /// None yet, of each.
  [[nodiscard]] std::vector<CompanionRows> no_rows() const {
    std::vector<CompanionRows> rows;
    for (const auto* const one : all_) rows.push_back(no_rows_of(*one));
    return rows;
  }
  /// Takes those of a block, of positions before `limit`. Which of them are needed is known when
  /// all blocks have come.
  /// \returns whether there were any
  bool take(std::span<const std::byte> bytes, std::int32_t begin, std::size_t limit,
            std::vector<CompanionRows>& rows) const {
    bool has_rows = false;
    (void)for_each_tier_row_of(shapes_, bytes,
                               [&](std::size_t c, std::size_t i, const std::byte* row) {
                                 has_rows = true;
                                 const std::int32_t position = begin + static_cast<std::int32_t>(i);
                                 if (to_size(position) < limit)
                                   std::copy_n(row, shapes_.widths[c], rows[c].add(position));
                               });
    for (std::size_t c = 0; c < rows.size(); ++c) all_[c]->trim(rows[c]);
    return has_rows;
  }
  /// Puts back those of tokens whose K/V is in place, as far as there is memory.
  void put_back(Sequence& sequence, std::vector<CompanionRows>& rows) const {
    for (std::size_t c = 0; c < rows.size(); ++c) {
      cut_rows(rows[c], sequence.num_written());
      if (!rows[c].ranges.empty() && all_[c]->reserve(sequence, rows[c]))
        all_[c]->scatter(sequence, rows[c]);
    }
  }

 private:
  const KvCompanions<Sequence> all_;
  TierRowShapes shapes_;
  std::vector<std::string> formats_;
  KnownKeys bare_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
