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
};

/// The plan of a mask: kept for as long as masks have the same bits, through all layers of a step.
/// Chunk s of the plan is stream s, with `cells` token slots; row s * rows + r is row r of it.
class MaskForest {
 public:
  /// Makes the plan of `mask`, unless it is that of the last call.
  /// \returns whether it was rebuilt
  bool update(const MaskView& mask);

  /// The plan; valid until the next update().
  [[nodiscard]] chunkattn::PlanView plan() const noexcept { return arrays_.view(); }
  /// Whether the plan shows more than the mask does: table() says what each logit gets.
  [[nodiscard]] bool has_table() const noexcept { return has_table_; }
  /// [streams * rows][cells]; minus infinity: hidden. Empty unless has_table().
  [[nodiscard]] std::span<const float> table() const noexcept { return table_; }

 private:
  struct Run {  // of cells that the same rows see
    int begin;
    int length;
  };
  struct Set {
    int first_run, num_runs, cells;
    int first_row, num_rows;  // in set_rows_, rows of the stream in ascending order
    int parent = -1;          // the smallest set of more rows that has these
    int segment = -1;
    std::int32_t end = 0;  // path position after its cells
  };

  [[nodiscard]] bool equals_last(const MaskView& mask) const noexcept;
  void remember(const MaskView& mask);
  void clear(const MaskView& mask);
  bool add_stream(const MaskView& mask, int stream);
  bool find_sets(const MaskView& mask, int stream);
  void find_rows(const MaskView& mask, int stream);
  bool find_parents(int rows);
  void number_rows(int stream, int rows);
  void add_segments(int stream);
  void add_pieces(int stream, const Set& set, std::int32_t position);
  void add_plain_stream(const MaskView& mask, int stream, int cells);
  void add_tables(const MaskView& mask);

  chunkattn::PlanView::Arrays arrays_;
  bool has_table_ = false;
  std::vector<float> table_;

  MaskView last_;                         // of which this is the plan; bits: whether it had any
  std::vector<std::uint16_t> last_bits_;  // without gaps
  bool valid_ = false;

  // Of the stream at work.
  std::vector<std::uint64_t> signatures_;  // by cell: of the rows that see it
  std::vector<std::int32_t> visible_;      // cells that each row sees
  std::vector<Run> runs_, sorted_runs_;
  std::vector<int> run_sets_, set_rows_, deepest_, order_, children_, row_of_;
  std::vector<Set> sets_;
};

}  // namespace plugin
