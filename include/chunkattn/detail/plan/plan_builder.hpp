// Builds the arrays of a plan from a step: updates those of the last step if possible, else walks
// the branches of the tree on which the step's sequences are.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../plan_view.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "../tree/step_reader.hpp"
#include "draft_trees.hpp"
#include "step_nodes.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Versions of segments, different for all plans of the process, so that a backend never takes
/// what it keeps for one plan for another's.
inline std::uint64_t next_segments_version() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

/// The arrays of one step after another; only updated if the next step is like the last one.
class PlanBuilder {
 public:
  /// Brings the arrays up to date with a step that has rows.
  void update(StepReader& step);

  /// The arrays; valid until the next update().
  [[nodiscard]] PlanView view() const noexcept { return arrays_.view(); }
  /// How often update() has rebuilt the arrays.
  [[nodiscard]] std::uint64_t num_rebuilds() const noexcept { return num_rebuilds_; }

 private:
  /// What was built for an entry of the step.
  struct Built {
    SequenceIndex sequence;
    std::uint32_t generation;
    std::int32_t length;           // query tokens
    std::int32_t row = 0;          // the plan's index of the first of them
    std::int32_t piece_limit = 0;  // end of the room for the sequence's own pieces
    std::int32_t covered = 0;      // path positions that the segments hold
  };

  /// The common step: lengths grow, and sometimes a tail gets another chunk. False if the entries
  /// differ, or a tail got its first slot, which makes a new segment.
  bool advance(const StepReader& step) {
    bool pieces_changed = false;
    std::int32_t* const row_kv_len = arrays_.row_kv_len.data();
    WriteTarget* const writes = arrays_.writes.data();
    Built* built = built_.data();
    for (const StepEntry& entry : step.entries()) {
      Built& row = *built++;
      if (entry.sequence != row.sequence || entry.generation != row.generation ||
          entry.length != row.length) [[unlikely]]
        return false;
      // Decoding within what the pieces cover, the output's slot included.
      if (entry.chunk != no_chunk && entry.begin + 2 <= row.covered) [[likely]] {
        row_kv_len[row.row] = entry.begin + 1;
        writes[entry.first_row] = {entry.chunk, entry.offset};
      } else if (!advance(step, entry, row, pieces_changed)) {
        return false;
      }
    }
    if (pieces_changed) ++arrays_.pieces_version;
    return true;
  }
  bool advance(const StepReader& step, const StepEntry& entry, Built& built, bool& pieces_changed) {
    const std::int32_t end = step.node(step.tail_of(entry)).end();
    Segment& segment = arrays_.segments[to_size(arrays_.row_segment[to_size(built.row)])];
    if (end > built.covered) {
      if (built.piece_limit == 0) return false;
      pieces_changed = true;
      while (end > segment.position + segment.length) append_piece(step, built, segment);
      built.covered = segment.position + segment.length;
    }
    for (std::int32_t i = 0; i < entry.length; ++i)
      arrays_.row_kv_len[to_size(built.row + i)] = entry.begin + i + 1;
    set_writes(step, entry, entry.length);
    return true;
  }

  /// Adds the tail's next chunk to its segment; moves the segment's pieces if there is no room.
  void append_piece(const StepReader& step, Built& built, Segment& segment) {
    if (segment.piece_begin + segment.num_pieces == built.piece_limit) {
      const std::size_t begin = arrays_.pieces.size();
      arrays_.pieces.resize(
          begin + 2 * to_size(segment.num_pieces) + to_size(slack(arrays_.chunk_size)), Piece{});
      std::copy_n(arrays_.pieces.begin() + segment.piece_begin, segment.num_pieces,
                  arrays_.pieces.begin() + static_cast<std::ptrdiff_t>(begin));
      segment.piece_begin = static_cast<std::int32_t>(begin);
      built.piece_limit = static_cast<std::int32_t>(arrays_.pieces.size());
    }
    const Piece& last = arrays_.pieces[to_size(segment.piece_begin + segment.num_pieces - 1)];
    const ChunkIndex next = step.next_chunk(last.chunk);
    arrays_.pieces[to_size(segment.piece_begin + segment.num_pieces)] = {
        next, 0, arrays_.chunk_size, last.position + last.length};
    ++segment.num_pieces;
    segment.length += arrays_.chunk_size;
  }

  /// Room left after a tail's pieces: a thousand tokens before the first move.
  static constexpr std::int32_t slack(std::int32_t chunk_size) noexcept {
    return (std::max)(8, 1024 / chunk_size);
  }

  // ---- rebuilding: walk up from each tail, then depth-first down over the marked nodes ---------

  struct Frame {
    NodeIndex next;          // child to visit
    std::int32_t segment;    // the last one of its path, none at the root
    bool leaves;             // on the way up: close `segment`
    std::int32_t sequences;  // seen before the segment was opened
  };

  void rebuild(const StepReader& step) {
    const std::int32_t num_rows = step.num_rows();
    built_for_ = 0;  // until all is there: an allocation may fail
    arrays_.chunk_size = step.chunk_size();
    arrays_.row_token.resize(to_size(num_rows));
    arrays_.row_kv_len.resize(to_size(num_rows));
    arrays_.row_segment.resize(to_size(num_rows));
    arrays_.writes.resize(to_size(num_rows));
    arrays_.segments.clear();
    arrays_.pieces.clear();
    built_.clear();
    for (const StepEntry& entry : step.entries())
      built_.push_back({entry.sequence, entry.generation, entry.length});
    nodes_.link(step);
    make_segments(step);
    for (const StepEntry& entry : step.entries())
      set_writes(step, entry, first_draft(step, entry) - entry.first_row);
    built_for_ = step.has_trees() ? 0 : step.tree_id();  // trees are others in every step
    built_version_ = step.version();
    arrays_.segments_version = next_segments_version();
    ++arrays_.pieces_version;
    ++num_rebuilds_;
  }

  /// Numbers the rows depth-first, and makes a segment of each run between two branches.
  void make_segments(const StepReader& step) {
    std::int32_t row = 0, sequences = 0;
    stack_.clear();
    push_children(step, root_node, none, row);
    while (!stack_.empty()) {
      const Frame frame = stack_.back();
      stack_.pop_back();
      if (frame.leaves) {
        arrays_.segments[to_size(frame.segment)].row_end = row;
        arrays_.segments[to_size(frame.segment)].num_sequences = sequences - frame.sequences;
        continue;
      }
      if (frame.next == none) continue;
      NodeIndex n = frame.next;
      if (nodes_[n].next_sibling != none)
        stack_.push_back({nodes_[n].next_sibling, frame.segment, false, 0});

      // One segment for this node and the single children that follow.
      const auto piece_begin = static_cast<std::int32_t>(arrays_.pieces.size());
      const std::int32_t position = step.node(n).position;
      add_pieces(step, n, piece_begin);
      while (nodes_[n].first_child != none && nodes_[n].first_child == nodes_[n].last_child) {
        n = nodes_[n].first_child;
        add_pieces(step, n, piece_begin);
      }
      std::int32_t segment = frame.segment;
      const auto piece_end = static_cast<std::int32_t>(arrays_.pieces.size());
      if (piece_end > piece_begin) {
        segment = static_cast<std::int32_t>(arrays_.segments.size());
        const Piece& last = arrays_.pieces.back();
        arrays_.segments.push_back({row, row, piece_begin, piece_end - piece_begin, position,
                                    last.position + last.length - position, frame.segment, 0});
        stack_.push_back({none, segment, true, sequences});
      }
      const std::int32_t e = nodes_[n].entry;
      if (e == none) {
        push_children(step, n, segment, row);
        continue;
      }
      const StepEntry& entry = step.entries()[to_size(e)];
      const std::span<const Draft> drafts = step.tree_of(entry);
      Built& built = built_[to_size(e)];
      if (piece_end > piece_begin) number_path(step, e, segment, row);
      if (step.node(n).length > 0 && drafts.empty()) {
        extend_to_chunk_end(step, n);
        arrays_.pieces.resize(arrays_.pieces.size() + to_size(slack(arrays_.chunk_size)), Piece{});
        built.piece_limit = static_cast<std::int32_t>(arrays_.pieces.size());
      }
      if (segment != none)
        built.covered =
            arrays_.segments[to_size(segment)].position + arrays_.segments[to_size(segment)].length;
      if (!drafts.empty() && step.counts(entry)) {
        draft_trees_.append(
            drafts, {first_draft(step, entry), row, entry.output_position(), segment}, arrays_);
        row += static_cast<std::int32_t>(drafts.size());
      }
      ++sequences;
    }
  }

  /// Visits the children of `n` next. Rows of tails that have no slot end at `segment`, as those
  /// of drafts on a fork do. They come first, because the rows of a segment are consecutive.
  void push_children(const StepReader& step, NodeIndex n, std::int32_t segment, std::int32_t& row) {
    const NodeIndex first = nodes_[n].first_child;
    stack_.push_back({first, segment, false, 0});
    for (NodeIndex child = first; child != none; child = nodes_[child].next_sibling)
      if (const std::int32_t e = nodes_[child].entry; e != none && num_slots(step, child) <= 0)
        number_path(step, e, segment, row);
  }

  /// The rows of an entry that end at `segment`: all but those of a tree of drafts.
  void number_path(const StepReader& step, std::int32_t e, std::int32_t segment,
                   std::int32_t& row) {
    const StepEntry& entry = step.entries()[to_size(e)];
    const std::span<const Draft> drafts = step.tree_of(entry);
    built_[to_size(e)].row = row;
    for (std::int32_t token = entry.first_row; token < first_draft(step, entry); ++token, ++row) {
      arrays_.row_token[to_size(row)] = token;
      arrays_.row_kv_len[to_size(row)] = entry.begin + token - entry.first_row + 1;
      arrays_.row_segment[to_size(row)] = segment;
    }
    if (drafts.empty() || step.counts(entry)) return;
    draft_trees_.append_superseded(
        drafts, {first_draft(step, entry), row, entry.output_position(), segment}, arrays_);
    row += static_cast<std::int32_t>(drafts.size());
  }

  /// The first row, as the caller counts, of an entry's tree of drafts; or the end of its rows.
  static std::int32_t first_draft(const StepReader& step, const StepEntry& entry) noexcept {
    return entry.first_row + entry.length - (step.tree_of(entry).empty() ? 0 : entry.drafts);
  }

  /// The slots of a node that belong to its segment: not those of a tree of drafts.
  std::int32_t num_slots(const StepReader& step, NodeIndex index) const noexcept {
    if (const std::int32_t e = nodes_[index].entry; e != none && step.has_trees()) {
      const StepEntry& entry = step.entries()[to_size(e)];
      if (!step.tree_of(entry).empty() && step.counts(entry))
        return entry.output_position() - step.node(index).position;
    }
    return step.node(index).length;
  }
  void add_pieces(const StepReader& step, NodeIndex index, std::int32_t piece_begin) {
    const std::int32_t position = step.node(index).position;
    step.for_each_run(
        index, num_slots(step, index),
        [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t done) {
          add_piece(arrays_.pieces, piece_begin, {chunk, offset, run, position + done});
        });
  }

  /// The piece also covers the free slots after a tail, so that it need not change until the
  /// chunk is full.
  void extend_to_chunk_end(const StepReader& step, NodeIndex tail) {
    if (!step.owns_end(tail)) return;
    Piece& last = arrays_.pieces.back();
    arrays_.segments.back().length += arrays_.chunk_size - (last.begin + last.length);
    last.length = arrays_.chunk_size - last.begin;
  }

  /// Where the K/V of the entry's first `num_rows` tokens go.
  void set_writes(const StepReader& step, const StepEntry& entry, std::int32_t num_rows) {
    WriteTarget* const writes = arrays_.writes.data() + entry.first_row;
    for (std::int32_t i = 0; i < num_rows; ++i) writes[i] = {no_chunk, 0};
    step.for_each_write(
        entry, num_rows,
        [&](std::int32_t row, ChunkIndex chunk, std::int32_t offset, std::int32_t count) {
          for (std::int32_t i = 0; i < count; ++i) writes[row + i] = {chunk, offset + i};
        });
  }

  Array<Built> built_;
  std::uint64_t built_for_ = 0;  // the tree's number, 0: nothing
  std::uint64_t built_version_ = 0;
  std::uint64_t num_rebuilds_ = 0;
  PlanArrays arrays_;

  StepNodes nodes_;
  Array<Frame> stack_;
  DraftTrees draft_trees_;
};

#if CHUNKATTN_BODIES
CHUNKATTN_FUNCTION void PlanBuilder::update(StepReader& step) {
  step.carry_copies(arrays_.copies);
  const bool may_advance = built_for_ == step.tree_id() && built_version_ == step.version() &&
                           built_.size() == step.entries().size() && !step.has_trees();
  if (!may_advance || !advance(step)) rebuild(step);
}
#endif

}  // namespace detail
CHUNKATTN_NAMESPACE_END
