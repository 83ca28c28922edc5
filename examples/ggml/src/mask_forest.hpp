// From a mask to a plan. ggml knows no sequences: that rows share what they read is in the mask
// alone, the same cells seen by several rows.
//
// A mask in which the cells of any two rows are nested or disjoint, where both see some, is a
// forest: cells seen by the same rows form a set, and the sets that one row sees are a path, from
// the set of most rows to that of fewest. The order of cells within a softmax is free, so the path
// becomes the row's positions: set after set, each in the order of its cells. A causal mask and
// every tree of sequences is such a forest. Sets that lose few rows at a time, as those of a prompt
// do from one token to the next, become one segment, whose rows differ in how much they see.
//
// Other masks, and masks with biases, become a table: all rows read all cells, with what the mask
// adds to each logit.
#pragma once

#include <chunkattn/plan_view.hpp>
#include <cstdint>
#include <span>
#include <vector>

namespace plugin {

/// The mask of one call: 16-bit floats as bits, [mask_streams][rows][cells], with strides.
struct MaskView {
  const std::uint16_t* bits = nullptr;  ///< null: every row sees every cell
  int streams = 1;                      ///< rows and cells of a stream have to do with no others
  int rows = 0;                         ///< query rows per stream
  int cells = 0;                        ///< K/V rows per stream
  std::int64_t row_stride = 0;          ///< elements from a row to the next
  std::int64_t stream_stride = 0;       ///< elements from a stream to the next; 0: all have one

  /// What the mask adds to the logits of a row.
  [[nodiscard]] std::span<const std::uint16_t> row(int stream, int row) const noexcept {
    return {bits + stream * stream_stride + row * row_stride, static_cast<std::size_t>(cells)};
  }
  friend bool operator==(const MaskView&, const MaskView&) = default;
};

/// The plan of a mask, which is read once. Chunk s of the plan is stream s, with `cells` token
/// slots; row s * rows + r is row r of it.
class MaskForest {
 public:
  /// Makes the plan of `mask`.
  void build(const MaskView& mask);

  /// The plan; valid until the next build().
  [[nodiscard]] chunkattn::PlanView plan() const noexcept { return arrays_.view(); }
  /// Whether the plan shows more than the mask does: table() says what each logit gets.
  [[nodiscard]] bool has_table() const noexcept { return has_table_; }
  /// [streams * rows][cells]; minus infinity: hidden. Empty unless has_table().
  [[nodiscard]] std::span<const float> table() const noexcept { return table_; }

 private:
  struct Change {  // a row that begins or ceases to see cells
    std::int32_t cell, row;
  };
  struct Run {  // of cells that the same rows see
    int begin, length;
    int set = -1;  // -1: no row sees it
  };
  struct Set {
    int example;  // one of its runs: members_of() it are the set's rows
    int num_rows;
    int first_run = 0, num_runs = 0, cells = 0;  // in sorted_runs_
    int parent = -1;                             // the smallest set of more rows that has these
    int first_row = 0;                           // of the plan
    int segment = -1;
    std::int32_t end = 0;  // path position after its cells
  };

  void clear(const MaskView& mask);
  bool add_stream(const MaskView& mask, int stream);
  bool find_runs(const MaskView& mask, int stream);
  void find_members(int rows);
  void find_sets();
  void sort_runs();
  bool find_parents(int rows);
  void number_rows(int stream, int rows);
  void add_segments(int stream);
  void add_pieces(int stream, const Set& set, chunkattn::PlanView::Segment& segment);
  void add_plain_stream(const MaskView& mask, int stream, int cells);
  void add_tables(const MaskView& mask);

  /// The rows that see a run, one bit each.
  [[nodiscard]] std::span<std::uint64_t> members_of(int run) noexcept {
    return {members_.data() + static_cast<std::size_t>(run) * words_, words_};
  }

  chunkattn::PlanView::Arrays arrays_;
  bool has_table_ = false;
  std::vector<float> table_;

  // Of the stream at work.
  std::vector<Change> changes_;
  std::vector<int> run_of_;  // by cell, and one more after them
  std::vector<Run> runs_, sorted_runs_;
  std::size_t words_ = 0;               // of the rows of a run
  std::vector<std::uint64_t> members_;  // [runs][words_]
  std::vector<Set> sets_;
  std::vector<int> known_;             // sets by their rows, an open hash table
  std::vector<int> order_, children_;  // sets
  std::vector<int> deepest_, row_of_;  // by row: the smallest set, and the row of the plan
};

}  // namespace plugin
