// Schedule: the work of one call cut into tasks, by plain integer arithmetic over the plan.
//
// Rows are cut into *row blocks* whose state fits the L2 cache; the work of a row block for one KV
// head is a list of *items* (some tokens of a segment, and the rows that see them): first those
// with enough query lines for matrix products, then those that are streamed, each parents first.
// Normally one task does the whole list, so the state of its rows never leaves the core. Where that
// gives too few tasks to keep every core busy, lists are cut along KV into several *splits* whose
// partial results are merged. Every split gets its share of the products and of the streamed items,
// so that all have the same mixture of arithmetic, which leaves memory idle, and reading.
//
// In deterministic mode the cuts depend on the plan and the geometry only, not on the number of
// threads, and so do the bits.
//
// In batch-invariant mode lists are not cut at all, and items hold whole blocks, which begin at
// multiples of block_tokens *positions*: each row is to see the same blocks, in order, however the
// tree cuts its path. A block that straddles segments belongs to the last of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// Tokens that a kernel takes at once, and the grain at which a segment can be cut.
inline constexpr int block_tokens = 64;

/// Tokens [token_begin, token_end) of a segment for [row_begin, row_end), counted from its start:
/// those with negative numbers lie before it on the rows' path, in the segments above.
struct WorkItem {
  std::int32_t segment;
  std::int32_t token_begin;
  std::int32_t token_end;
  std::int32_t row_begin;
  std::int32_t row_end;
};

/// Items [item_begin, item_end) of one row block, for its rows [row_begin, row_end). Those from
/// stream_begin on are streamed, those before are products.
struct Split {
  [[nodiscard]] int num_rows() const noexcept { return row_end - row_begin; }

  std::int32_t item_begin;
  std::int32_t stream_begin;
  std::int32_t item_end;
  std::int32_t row_begin;
  std::int32_t row_end;
  std::int64_t partial_row;  ///< first row of its partial results, among all splits'
  double cost;
};

/// Rows whose state one task holds. With one split there is nothing to merge.
struct RowBlock {
  [[nodiscard]] int num_rows() const noexcept { return row_end - row_begin; }

  std::int32_t row_begin;
  std::int32_t row_end;
  std::int32_t split_begin;
  std::int32_t split_count;
  bool has_products;
  double cost;  ///< of all splits, for one KV head
};

/// What the machine can do, roughly: only ratios matter.
struct CostModel {
  double bytes_per_token = 0;                         ///< K and V of one token and KV head
  double flops_per_token_line = 0;                    ///< one query line against one token
  double product_flops_per_ns = stream_flops_per_ns;  ///< of what computes products
  static constexpr double stream_flops_per_ns = 140;  ///< of the vectors' multiply-adds
  static constexpr double bytes_per_ns = 16;
  static constexpr double fixed_ns = 200;  ///< of any item

  /// `product`: the item is computed by products, else it is streamed.
  [[nodiscard]] double item_ns(const WorkItem& item, int group, bool product) const noexcept {
    const int lines = (item.row_end - item.row_begin) * group;
    const double memory = bytes_per_token / bytes_per_ns;
    const double rate = product ? product_flops_per_ns : stream_flops_per_ns;
    const double compute = flops_per_token_line * lines / rate;
    return fixed_ns + (std::max)(memory, compute) * (item.token_end - item.token_begin);
  }
};

/// What a schedule is cut for.
struct ScheduleOptions {
  int num_kv_heads = 1;
  int group = 1;                ///< query heads per KV head
  int max_lines = 256;          ///< lines (rows * group) of a row block, unless one row has more
  int min_product_lines = 5;    ///< with fewer lines an item is streamed
  int product_grain = 1;        ///< products compute multiples of so many lines
  double min_product_fill = 0;  ///< an item is streamed if it has less than this part of those
  int tile_lines = 32;  ///< lines that a product needs to be efficient: blocks have no fewer
  int min_tasks = 1;    ///< how many tasks are wanted in all, if the work allows
  CostModel cost;
  int min_free_tasks = 0;  ///< at least so many where nothing is shared, so that they cost nothing
  const KeyRange* hidden = nullptr;  ///< [num_rows] keys that are not read for a row, or null
  bool invariant = false;  ///< each row sees whole blocks in order: Reduce::batch_invariant
};

/// Derives and holds the tasks of one call. Its memory is kept: no allocation once it has seen the
/// largest plan. Cost: O(rows + segments + splits).
class Schedule {
 public:
  /// A list is cut only into parts of at least this cost, and this much per query line: loading,
  /// leaving and merging a line's state takes about 150 ns.
  static constexpr double min_split_ns = 25'000;
  static constexpr double min_split_line_ns = 2'000;  ///< where vectors compute products

  void derive(const PlanView& plan, const ScheduleOptions& options) {
    options_ = options;
    find_visible(plan);
    const int fewest = ceil_div(plan.num_rows, (std::max)(1, options.max_lines / options.group));
    cut_rows(plan, fewest);
    const double total = total_ns();
    if (num_shared_items_ > 0 || !try_cut_rows_freely(plan, total)) {
      const int blocks = num_blocks(plan.num_rows, fewest, total);
      if (blocks != static_cast<int>(row_blocks_.size())) cut_rows(plan, blocks);
    }
    cut_items();
  }

  [[nodiscard]] const Array<WorkItem>& items() const noexcept { return split_items_; }
  [[nodiscard]] const Array<Split>& splits() const noexcept { return splits_; }
  [[nodiscard]] const Array<RowBlock>& row_blocks() const noexcept { return row_blocks_; }
  /// Rows of partial results per KV head, all splits that need merging together.
  [[nodiscard]] std::int64_t num_partial_rows() const noexcept { return num_partial_rows_; }
  /// Items of segments that several sequences have in common: 0 if nothing is shared.
  [[nodiscard]] int num_shared_items() const noexcept { return num_shared_items_; }

 private:
  static int ceil_div(int a, int b) { return static_cast<int>((std::int64_t{a} + b - 1) / b); }

  // A split's least cost per line: the same number of tokens, whatever computes the products. (In
  // time, faster products would have fewer tokens to a row block, and pack these for every one.)
  double split_line_ns() const noexcept {
    return min_split_line_ns * CostModel::stream_flops_per_ns / options_.cost.product_flops_per_ns;
  }

  // Row blocks of which each KV head has about so many tasks in all.
  int blocks_for(int tasks) const noexcept { return ceil_div(tasks, options_.num_kv_heads); }

  // Where rows have next to nothing in common, cuts between them cost nothing, so tasks may be
  // small enough to end together: cuts them so, and returns whether it is so. If not, other cuts
  // are to be made.
  bool try_cut_rows_freely(const PlanView& plan, double total_ns) {
    const int wanted = blocks_for((std::max)(options_.min_tasks, options_.min_free_tasks));
    const int fewest = static_cast<int>(row_blocks_.size());
    if (fewest >= wanted) return true;
    const double row_ns = total_ns / plan.num_rows + 1;
    const int rows = (std::max)(ceil_div(ceil_div(plan.num_rows, wanted), 4),
                                static_cast<int>(min_split_ns / row_ns) + 1);
    const std::int64_t tokens = total_tokens();
    cut_rows(plan, (std::max)(fewest, ceil_div(plan.num_rows, rows)));
    // More are read again where query tokens of one sequence were parted.
    return total_tokens() - tokens <= tokens / 20;
  }

  // Into how many blocks rows are cut that read much in common, if the largest blocks give fewer
  // tasks than wanted. Cutting rows costs another pass over what they share, from a cache; cutting
  // along KV costs the lines' states.
  int num_blocks(int num_rows, int fewest, double total_ns) const {
    const int group = options_.group;
    const int wanted = blocks_for(options_.min_tasks);
    if (fewest >= wanted) return fewest;
    if (options_.invariant) {  // there are no cuts along KV: as small as products are worth it
      int rows = ceil_div(num_rows, wanted);
      while (rows < num_rows && !uses_products(rows)) ++rows;
      return (std::max)(fewest, num_rows / rows);
    }
    // Worth it where there is too little to read per line for as many cuts along KV.
    if (total_ns / (num_rows * group * split_line_ns()) >= 0.5 * wanted) return fewest;
    // As many as fill the vectors of the products: 33 lines would cost as much as 48.
    const int most = (std::min)(wanted, num_rows / ceil_div(options_.tile_lines, group));
    for (int count = most; count > fewest; --count)
      if (16 * padded_lines(num_rows, count) <= 17 * num_rows * group) return count;
    return fewest;
  }
  // Whether products compute an item of so many rows faster than streams. Products are computed
  // before streams: where a row's bits depend on the order, no segment may be streamed whose
  // children, which have no more rows, are products.
  bool uses_products(int rows) const noexcept {
    const std::int64_t lines = std::int64_t{rows} * options_.group;
    const std::int64_t grain = options_.product_grain;
    const std::int64_t computed = options_.invariant ? grain : (lines + grain - 1) / grain * grain;
    return lines >= options_.min_product_lines &&
           static_cast<double>(lines) >= options_.min_product_fill * static_cast<double>(computed);
  }
  // Lines that products compute if rows are cut into so many blocks: half a tile is their grain.
  int padded_lines(int num_rows, int num_blocks) const noexcept {
    const int grain = options_.tile_lines / 2;
    int total = 0;
    for (int b = 0; b < num_blocks; ++b) {
      const int lines =
          (cut(num_rows, b + 1, num_blocks) - cut(num_rows, b, num_blocks)) * options_.group;
      total += ceil_div(lines, grain) * grain;
    }
    return total;
  }

  // Where the tokens of each segment end that any row sees, from the rows' lengths up the tree: not
  // positive if rows see none of it. And how many rows see no segment below it.
  void find_visible(const PlanView& plan) {
    visible_.assign(to_size(plan.num_segments), 0);
    ending_.assign(to_size(plan.num_segments), 0);
    for (int row = 0; row < plan.num_rows; ++row) {
      const std::int32_t s = plan.row_segment[row];
      if (s < 0) continue;
      ++ending_[to_size(s)];
      std::int32_t& kv_len = visible_[to_size(s)];
      kv_len = (std::max)(kv_len, plan.row_kv_len[row]);
    }
    for (int s = plan.num_segments; s-- > 0;) {
      const Segment& segment = plan.segments[s];
      const std::int32_t kv_len = visible_[to_size(s)];
      if (segment.parent >= 0) {
        std::int32_t& above = visible_[to_size(segment.parent)];
        above = (std::max)(above, kv_len);
      }
      visible_[to_size(s)] = (std::min)(kv_len - segment.position, segment.length);
    }
  }

  void cut_rows(const PlanView& plan, int count) {
    row_blocks_.resize(to_size(count));
    for (int b = 0; b < count; ++b) {
      RowBlock& block = row_blocks_[to_size(b)];
      block = {cut(plan.num_rows, b, count), cut(plan.num_rows, b + 1, count), 0, 0, false, 0};
    }
    list_items(plan);
  }
  static std::int32_t cut(int total, int part, int parts) {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(total) * part / parts);
  }

  // What is read for whom, parents first: f(item).
  template <class F>
  void for_each_item(const PlanView& plan, const F& f) const {
    const auto list_item = [&](int s, int begin, int end, int row_begin, int row_end) {
      if (begin < end && row_begin < row_end) f(WorkItem{s, begin, end, row_begin, row_end});
    };
    for (int s = 0; s < plan.num_segments; ++s) {
      const Segment& segment = plan.segments[s];
      const std::int32_t end = visible_[to_size(s)];
      int ending = ending_[to_size(s)];
      if (!options_.invariant) {
        list_item(s, 0, end, segment.row_begin, segment.row_end);
        continue;
      }
      // Blocks that end in this segment are the same for all of its rows. The one after these
      // straddles for rows that go on; it ends here for the others.
      const std::int32_t begin = -(segment.position % block_tokens);
      const std::int32_t whole =
          segment.length - (segment.position + segment.length) % block_tokens;
      const bool all_end = ending == segment.row_end - segment.row_begin;
      list_item(s, begin, all_end ? end : (std::min)(whole, end), segment.row_begin,
                segment.row_end);
      if (all_end) continue;
      for (int row = segment.row_begin; row < segment.row_end && ending > 0; ++row) {
        const int first = row;
        while (row < segment.row_end && plan.row_segment[row] == s) ++row;
        list_item(s, whole, end, first, row);
        ending -= row - first;
      }
    }
  }

  // The tokens of an item that some row sees: those before and those after what is hidden from all.
  template <class F>
  void for_each_visible_part(const PlanView& plan, const WorkItem& item, const F& f) const {
    KeyRange hidden = options_.hidden[item.row_begin];
    std::int32_t kv_len = 0;
    for (int row = item.row_begin; row < item.row_end; ++row) {
      hidden.begin = (std::max)(hidden.begin, options_.hidden[row].begin);
      hidden.end = (std::min)(hidden.end, options_.hidden[row].end);
      kv_len = (std::max)(kv_len, plan.row_kv_len[row]);
    }
    hidden.begin = (std::min)(hidden.begin, kv_len);
    if (options_.invariant) {  // whole blocks
      hidden.begin = ceil_div(hidden.begin, block_tokens) * block_tokens;
      hidden.end = hidden.end / block_tokens * block_tokens;
    }
    const std::int32_t position = plan.segments[item.segment].position;
    const auto list_part = [&](int begin, int end) {
      WorkItem part = item;
      part.token_begin = (std::max)(part.token_begin, begin - position);
      part.token_end = (std::min)(part.token_end, end - position);
      if (part.token_begin < part.token_end) f(part);
    };
    if (hidden.size() == 0) hidden.end = hidden.begin;
    list_part(0, (std::min)(hidden.begin, kv_len));
    list_part(hidden.end, kv_len);
  }

  // Each segment goes into every row block that it meets: to the products if enough rows of the
  // block see it (counting sort, order kept).
  void list_items(const PlanView& plan) {
    const std::size_t blocks = row_blocks_.size();
    block_items_.assign(2 * blocks + 1, 0);  // products of block 0, its streams, products of 1, …
    const auto first_block = [&](std::int32_t row) {
      std::size_t b = to_size(row) * blocks / to_size(plan.num_rows);
      while (b > 0 && row_blocks_[b].row_begin > row) --b;
      while (b + 1 < blocks && row_blocks_[b].row_end <= row) ++b;
      return b;
    };
    const auto for_each_block = [&](auto&& f) {
      for_each_item(plan, [&](WorkItem item) {
        const std::int32_t row_begin = item.row_begin;
        const std::int32_t row_end = item.row_end;
        for (std::size_t b = first_block(row_begin);
             b < blocks && row_blocks_[b].row_begin < row_end; ++b) {
          item.row_begin = (std::max)(row_begin, row_blocks_[b].row_begin);
          item.row_end = (std::min)(row_end, row_blocks_[b].row_end);
          const std::size_t list = 2 * b + (uses_products(item.row_end - item.row_begin) ? 0 : 1);
          if (options_.hidden == nullptr)
            f(list, item);
          else
            for_each_visible_part(plan, item, [&](const WorkItem& part) { f(list, part); });
        }
      });
    };
    for_each_block([&](std::size_t list, const WorkItem&) { ++block_items_[list + 1]; });
    for (std::size_t l = 0; l < 2 * blocks; ++l) block_items_[l + 1] += block_items_[l];
    items_.resize(to_size(block_items_[2 * blocks]));
    fill_.assign(block_items_.begin(), block_items_.end() - 1);
    num_shared_items_ = 0;
    for_each_block([&](std::size_t list, const WorkItem& item) {
      items_[to_size(fill_[list]++)] = item;
      if (plan.segments[item.segment].num_sequences > 1) ++num_shared_items_;
    });
  }

  double item_ns(const WorkItem& item) const noexcept {
    return options_.cost.item_ns(item, options_.group,
                                 uses_products(item.row_end - item.row_begin));
  }
  std::int64_t total_tokens() const noexcept {
    std::int64_t total = 0;
    for (const WorkItem& item : items_) total += item.token_end - item.token_begin;
    return total;
  }
  double total_ns() const noexcept {
    double total = 0;
    for (const WorkItem& item : items_) total += item_ns(item);
    return total;
  }

  // What is left of one list of a row block, and the cost of what was taken.
  struct Rest {
    const WorkItem* item;
    const WorkItem* end;
    int tokens = 0;  // of the next item
    double taken = 0;
    double total = 0;
  };
  Rest rest_of(std::size_t list) const noexcept {
    Rest rest{items_.data() + block_items_[list], items_.data() + block_items_[list + 1]};
    for (const WorkItem* item = rest.item; item != rest.end; ++item) rest.total += item_ns(*item);
    return rest;
  }
  // Gives the open split items up to `part` of the list, the last one cut if need be.
  void take(Rest& rest, double part) {
    while (rest.item != rest.end) {
      WorkItem item = *rest.item;
      item.token_begin += rest.tokens;
      const double room = rest.total * part - rest.taken;
      const double all_ns = item_ns(item);
      if (part < 1 && all_ns > room) {
        const double fraction = (room - CostModel::fixed_ns) / (all_ns - CostModel::fixed_ns);
        const double blocks = fraction * (item.token_end - item.token_begin) / block_tokens;
        const int tokens = static_cast<int>((std::max)(0.0, blocks) + 0.5) * block_tokens;
        if (tokens == 0) return;
        item.token_end = (std::min)(item.token_end, item.token_begin + tokens);
      }
      const double taken_ns = item_ns(item);
      add_item(item, taken_ns);
      rest.taken += taken_ns;
      rest.tokens = item.token_end - rest.item->token_begin;
      if (item.token_end < rest.item->token_end) return;
      ++rest.item;
      rest.tokens = 0;
    }
  }

  void cut_items() {
    const bool few =
        !options_.invariant &&
        static_cast<int>(row_blocks_.size()) * options_.num_kv_heads < options_.min_tasks;
    const double share = total_ns() * options_.num_kv_heads / options_.min_tasks;
    splits_.clear();
    split_items_.clear();
    num_partial_rows_ = 0;
    for (std::size_t b = 0; b < row_blocks_.size(); ++b) {
      RowBlock& block = row_blocks_[b];
      block.split_begin = static_cast<std::int32_t>(splits_.size());
      Rest products = rest_of(2 * b);
      Rest streams = rest_of(2 * b + 1);
      block.cost = products.total + streams.total;
      block.has_products = products.total > 0;
      const int lines = block.num_rows() * options_.group;
      // Fast products have small splits only where there would be less than half of the tasks.
      const double target = (std::max)({min_split_ns, split_line_ns() * lines, share,
                                        (std::min)(min_split_line_ns * lines, 2 * share)});
      const int parts = few ? (std::max)(1, static_cast<int>(block.cost / target + 0.5)) : 1;
      for (int part = 1; part <= parts; ++part) {
        open_split();
        take(products, static_cast<double>(part) / parts);
        splits_.back().stream_begin = static_cast<std::int32_t>(split_items_.size());
        take(streams, static_cast<double>(part) / parts);
        const bool empty = splits_.back().item_begin == splits_.back().item_end;
        if (empty && parts > 1) splits_.pop_back();
      }
      block.split_count = static_cast<std::int32_t>(splits_.size()) - block.split_begin;
      if (block.split_count > 1) number_partials(block);
    }
  }

  // Several splits of a row block leave partial results, to be merged.
  void number_partials(const RowBlock& block) noexcept {
    for (std::int32_t u = 0; u < block.split_count; ++u) {
      Split& split = splits_[to_size(block.split_begin + u)];
      split.partial_row = num_partial_rows_;
      num_partial_rows_ += split.num_rows();
    }
  }

  void open_split() {
    const auto at = static_cast<std::int32_t>(split_items_.size());
    splits_.push_back({at, at, at, 0, 0, 0, 0.0});
  }
  void add_item(const WorkItem& item, double cost) {
    Split& split = splits_.back();
    if (split.item_begin == split.item_end) {
      split.row_begin = item.row_begin;
      split.row_end = item.row_end;
    }
    split.row_begin = (std::min)(split.row_begin, item.row_begin);
    split.row_end = (std::max)(split.row_end, item.row_end);
    split.cost += cost;
    split_items_.push_back(item);
    split.item_end = static_cast<std::int32_t>(split_items_.size());
  }

  ScheduleOptions options_;
  Array<std::int32_t> visible_, ending_, block_items_, fill_;
  Array<WorkItem> items_, split_items_;
  Array<RowBlock> row_blocks_;
  Array<Split> splits_;
  std::int64_t num_partial_rows_ = 0;
  int num_shared_items_ = 0;
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
