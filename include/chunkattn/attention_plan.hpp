// AttentionPlan: what one step computes, as plain arrays for the kernels (the paper's context,
// section 3.3, generated only when the tree's shape or the batch changed).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config.hpp"
#include "error.hpp"
#include "plan_types.hpp"
#include "tree_nodes.hpp"
#include "tree_types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Numbers topologies over all plans of the process, so that what a kernel keeps for one is never
/// taken for another's.
inline std::uint64_t next_topology() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace detail

/// The query tokens of one step and the K/V that each of them reads.
///
/// Each step: clear(), add() the sequences that run, in any order and any subset, then update().
/// If neither the tree's version nor the list of (sequence, number of query tokens) changed since
/// the last update, only lengths advance: O(rows), nothing is allocated. Filling a chunk adds one
/// piece to its sequence and is no rebuild either.
class AttentionPlan {
 public:
  /// Forgets the rows, not what was built for them.
  void clear() noexcept {
    entries_.clear();
    num_rows_ = 0;
  }

  /// `queries.length` query tokens at these path positions, causal. Their rows in q and out follow
  /// those of the sequences added before. Throws InvalidArgument if the sequence is not live or
  /// has no such positions.
  template <class Sequence>
  void add(const Sequence& sequence, TokenRange queries) {
    const auto end = static_cast<std::int64_t>(sequence.size() + sequence.num_reserved());
    detail::check_argument(queries.length >= 1, "queries.length", queries.length,
                           "at least one query token");
    if (queries.begin < 0 || queries.end() > end) [[unlikely]]
      detail::fail_argument("queries.end()", queries.end(),
                            "positions within the " + std::to_string(end) +
                                " known and reserved tokens of the sequence");
    entries_.push_back(
        {sequence.tree_id(), sequence.index(), sequence.generation(), queries, num_rows_});
    num_rows_ += queries.length;
  }

  /// Brings the arrays up to date with the tree and starts a step of it. Throws InvalidArgument,
  /// with plan and tree unchanged, if there are no rows, a sequence was added twice, left since, or
  /// belongs to another tree, or if it would read K/V that nobody has written by then.
  template <class Tree>
  void update(Tree& tree) {
    auto& core = tree.core();
    check(core);
    step_ = core.begin_step(copies_);
    if (!matches(core) || !advance(core, Tree::chunk_size)) build(core, Tree::chunk_size);
  }

  /// The arrays, valid until the next update().
  [[nodiscard]] PlanView view() const noexcept {
    PlanView view;
    view.num_rows = static_cast<std::int32_t>(row_token_.size());
    view.num_segments = static_cast<std::int32_t>(segments_.size());
    view.num_pieces = static_cast<std::int32_t>(pieces_.size());
    view.num_copies = static_cast<std::int32_t>(copies_.size());
    view.chunk_size = chunk_size_;
    view.segments = segments_.data();
    view.pieces = pieces_.data();
    view.row_token = row_token_.data();
    view.row_kv_len = row_kv_len_.data();
    view.row_segment = row_segment_.data();
    view.writes = writes_.data();
    view.copies = copies_.data();
    view.topology = topology_;
    view.pieces_version = pieces_version_;
    return view;
  }

  /// Query tokens added since clear().
  [[nodiscard]] int num_rows() const noexcept { return num_rows_; }
  /// The tree's number for this step, for PrefixTree::retire().
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// How often update() had to rebuild.
  [[nodiscard]] std::uint64_t num_rebuilds() const noexcept { return num_rebuilds_; }

 private:
  struct Entry {
    std::uint64_t tree;
    SequenceIndex sequence;
    std::uint32_t generation;
    TokenRange queries;
    std::int32_t token;            // the caller's index of the first query token
    std::int32_t row = 0;          // the plan's index of the first query token
    std::int32_t piece_limit = 0;  // end of the room for this entry's own pieces

    [[nodiscard]] bool same_shape(const Entry& other) const noexcept {
      return sequence == other.sequence && generation == other.generation &&
             queries.length == other.queries.length;
    }
  };

  static constexpr std::int32_t none = -1;
  static std::size_t at(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

  template <class Core>
  void check(const Core& core) {
    detail::check_argument(!entries_.empty(), "rows", 0, "at least one sequence: call add() first");
    ++mark_;
    bool any_waits = false;
    for (std::size_t e = 0; e < entries_.size(); ++e) {
      const Entry& entry = entries_[e];
      detail::check_argument(entry.tree == core.id(), "sequence", "of another tree",
                             "sequences of the tree that is passed to update()");
      detail::check_argument(core.is_live(entry.sequence, entry.generation), "sequence", "left",
                             "sequences that are live at update()");
      if (entry_of_.size() <= at(entry.sequence)) entry_of_.resize(2 * at(entry.sequence) + 16);
      SequenceMark& seen = entry_of_[at(entry.sequence)];
      detail::check_argument(seen.mark != mark_, "sequence", "added twice",
                             "each sequence at most once per step");
      seen = {mark_, static_cast<std::int32_t>(e)};
      const auto& record = core.sequence(entry.sequence);
      detail::check_argument(entry.queries.end() <= record.size + record.reserved, "queries.end()",
                             entry.queries.end(), "positions that are still reserved at update()");
      any_waits = any_waits || record.may_wait;
      if (record.cursor < record.size && !core.options().async_steps) check_computed(core, entry);
    }
    if (!any_waits) return;
    for (const Entry& entry : entries_) check_writers(core, entry);
  }

  /// The sequence does not run ahead of its own tokens that are still to be computed. (With
  /// asynchronous steps an earlier step that is not committed yet may compute them.)
  template <class Core>
  void check_computed(const Core& core, const Entry& entry) const {
    core.for_each_node(entry.sequence, {0, entry.queries.begin},
                       [&](NodeIndex index, std::int32_t, std::int32_t length) {
                         const auto& n = core.node(index);
                         if (n.written >= length || n.writer != entry.sequence) return;
                         detail::fail_argument("queries.begin", entry.queries.begin,
                                               "at most " + std::to_string(n.position + n.written) +
                                                   ", the first token without K/V");
                       });
  }

  /// Every position that the entry reads is written, or its writer writes it in this very step.
  template <class Core>
  void check_writers(const Core& core, const Entry& entry) const {
    if (!core.sequence(entry.sequence).may_wait) return;
    core.for_each_node(
        entry.sequence, {0, entry.queries.end()},
        [&](NodeIndex index, std::int32_t, std::int32_t length) {
          const auto& n = core.node(index);
          if (n.written >= length || n.writer == entry.sequence) return;
          const SequenceMark& seen = entry_of_at(n.writer);
          const bool runs = seen.mark == mark_;
          const TokenRange range = runs ? entries_[at(seen.entry)].queries : TokenRange{};
          if (runs && range.begin <= n.position + n.written && range.end() >= n.position + length)
            return;
          detail::fail_argument("queries.begin", entry.queries.begin,
                                "that the sequence which is to write positions " +
                                    std::to_string(n.position + n.written) + " to " +
                                    std::to_string(n.position + length - 1) +
                                    " computes them in this step or has committed them");
        });
  }

  struct SequenceMark {
    std::uint64_t mark = 0;
    std::int32_t entry = 0;
  };
  [[nodiscard]] SequenceMark entry_of_at(SequenceIndex s) const noexcept {
    return s >= 0 && at(s) < entry_of_.size() ? entry_of_[at(s)] : SequenceMark{};
  }

  template <class Core>
  [[nodiscard]] bool matches(const Core& core) const noexcept {
    return built_for_ == core.id() && built_version_ == core.version() &&
           built_.size() == entries_.size() &&
           std::equal(entries_.begin(), entries_.end(), built_.begin(),
                      [](const Entry& a, const Entry& b) { return a.same_shape(b); });
  }

  /// The common step: lengths grow, and now and then a tail gets one slot more. False if a tail
  /// got its first place, which makes a new segment.
  template <class Core>
  bool advance(const Core& core, std::int32_t chunk_size) {
    bool pieces_changed = false;
    for (std::size_t e = 0; e < entries_.size(); ++e) {
      Entry& entry = entries_[e];
      if (e + 8 < entries_.size()) {
        CHUNKATTN_PREFETCH(&core.node(core.sequence(entries_[e + 8].sequence).tail));
        CHUNKATTN_PREFETCH(&segments_[at(row_segment_[at(built_[e + 8].row)])]);
      }
      entry.row = built_[e].row;
      entry.piece_limit = built_[e].piece_limit;
      const auto& tail = core.node(core.sequence(entry.sequence).tail);
      Segment& segment = segments_[at(row_segment_[at(entry.row)])];
      if (tail.end() > segment.position + segment.length) {
        if (entry.piece_limit == 0) return false;
        pieces_changed = true;
        while (tail.end() > segment.position + segment.length)
          append_piece(core, entry, segment, chunk_size);
        built_[e].piece_limit = entry.piece_limit;
      }
      for (std::int32_t i = 0; i < entry.queries.length; ++i)
        row_kv_len_[at(entry.row + i)] = entry.queries.begin + i + 1;
      set_writes(core, entry);
    }
    if (pieces_changed) ++pieces_version_;
    return true;
  }

  /// Adds the tail's next slot to its segment, moving the segment's pieces where they have room.
  template <class Core>
  void append_piece(const Core& core, Entry& entry, Segment& segment, std::int32_t chunk_size) {
    if (segment.piece_begin + segment.piece_count == entry.piece_limit) {
      const std::size_t begin = pieces_.size();
      pieces_.resize(begin + 2 * at(segment.piece_count) + at(slack(chunk_size)), Piece{});
      std::copy_n(pieces_.begin() + segment.piece_begin, segment.piece_count,
                  pieces_.begin() + static_cast<std::ptrdiff_t>(begin));
      segment.piece_begin = static_cast<std::int32_t>(begin);
      entry.piece_limit = static_cast<std::int32_t>(pieces_.size());
    }
    const Piece& last = pieces_[at(segment.piece_begin + segment.piece_count - 1)];
    const SlotIndex next = core.next_slot(last.slot);
    pieces_[at(segment.piece_begin + segment.piece_count)] = {next, 0, chunk_size,
                                                              last.position + last.length};
    ++segment.piece_count;
    segment.length += chunk_size;
  }

  /// Room left behind a tail's pieces: a thousand tokens before the first move.
  static constexpr std::int32_t slack(std::int32_t chunk_size) noexcept {
    return std::max(8, 1024 / chunk_size);
  }

  // ---- rebuilding: walk up from each tail, then depth-first down over what was touched ---------

  struct ActiveNode {
    std::uint64_t mark = 0;
    std::int32_t first_child = none, last_child = none, next_sibling = none;
    std::int32_t entry = none;  // of the sequence whose tail this is
  };
  struct Frame {
    NodeIndex next;        // child to visit
    std::int32_t segment;  // that its path runs through, none at the root
    bool leaves;           // on the way up: close `segment`
    std::int32_t entries;  // seen before the segment was opened
  };

  template <class Core>
  void build(const Core& core, std::int32_t chunk_size) {
    built_for_ = 0;  // until all is there: an allocation may fail
    chunk_size_ = chunk_size;
    row_token_.resize(at(num_rows_));
    row_kv_len_.resize(at(num_rows_));
    row_segment_.resize(at(num_rows_));
    writes_.resize(at(num_rows_));
    segments_.clear();
    pieces_.clear();
    link_paths(core);
    number_rows(core, chunk_size);
    for (const Entry& entry : entries_) set_writes(core, entry);
    built_ = entries_;
    built_for_ = core.id();
    built_version_ = core.version();
    topology_ = detail::next_topology();
    ++pieces_version_;
    ++num_rebuilds_;
  }

  /// Marks the nodes on the rows' paths and links them to their marked children, in the order of
  /// the first row below.
  template <class Core>
  void link_paths(const Core& core) {
    ++mark_;
    const auto touch = [&](NodeIndex n) -> ActiveNode& {
      if (nodes_.size() <= at(n)) nodes_.resize(2 * at(n) + 64);
      ActiveNode& node = nodes_[at(n)];
      if (node.mark != mark_) {
        node = ActiveNode{};
        node.mark = mark_;
      }
      return node;
    };
    touch(detail::root_node);
    for (std::size_t e = 0; e < entries_.size(); ++e) {
      NodeIndex child = core.sequence(entries_[e].sequence).tail;
      touch(child).entry = static_cast<std::int32_t>(e);
      while (child != detail::root_node) {
        const NodeIndex parent = core.node(child).parent;
        const bool known = at(parent) < nodes_.size() && nodes_[at(parent)].mark == mark_;
        ActiveNode& node = touch(parent);
        if (node.first_child == none)
          node.first_child = child;
        else
          nodes_[at(node.last_child)].next_sibling = child;
        node.last_child = child;
        if (known) break;
        child = parent;
      }
    }
  }

  template <class Core>
  void number_rows(const Core& core, std::int32_t chunk_size) {
    std::int32_t row = 0, entries = 0;
    stack_.clear();
    stack_.push_back({nodes_[detail::root_node].first_child, none, false, 0});
    while (!stack_.empty()) {
      const Frame frame = stack_.back();
      stack_.pop_back();
      if (frame.leaves) {
        segments_[at(frame.segment)].row_end = row;
        segments_[at(frame.segment)].num_sequences = entries - frame.entries;
        continue;
      }
      if (frame.next == none) continue;
      NodeIndex n = frame.next;
      if (nodes_[at(n)].next_sibling != none)
        stack_.push_back({nodes_[at(n)].next_sibling, frame.segment, false, 0});

      // One segment for the unary run that starts here.
      const auto piece_begin = static_cast<std::int32_t>(pieces_.size());
      const std::int32_t position = core.node(n).position;
      add_pieces(core, n, piece_begin);
      while (nodes_[at(n)].first_child != none &&
             nodes_[at(n)].first_child == nodes_[at(n)].last_child) {
        n = nodes_[at(n)].first_child;
        add_pieces(core, n, piece_begin);
      }
      std::int32_t segment = frame.segment;
      const auto piece_end = static_cast<std::int32_t>(pieces_.size());
      if (piece_end > piece_begin) {
        segment = static_cast<std::int32_t>(segments_.size());
        const Piece& last = pieces_.back();
        segments_.push_back({row, row, piece_begin, piece_end - piece_begin, position,
                             last.position + last.length - position, frame.segment, 0});
        stack_.push_back({none, segment, true, entries});
      }
      const std::int32_t e = nodes_[at(n)].entry;
      if (e == none) {
        stack_.push_back({nodes_[at(n)].first_child, segment, false, 0});
        continue;
      }
      Entry& entry = entries_[at(e)];
      entry.row = row;
      entry.piece_limit = 0;
      if (core.node(n).length > 0) {
        extend_to_slot_end(core, n, chunk_size);
        pieces_.resize(pieces_.size() + at(slack(chunk_size)), Piece{});
        entry.piece_limit = static_cast<std::int32_t>(pieces_.size());
      }
      for (std::int32_t i = 0; i < entry.queries.length; ++i, ++row) {
        row_token_[at(row)] = entry.token + i;
        row_kv_len_[at(row)] = entry.queries.begin + i + 1;
        row_segment_[at(row)] = segment;
      }
      ++entries;
    }
  }

  template <class Core>
  void add_pieces(const Core& core, NodeIndex index, std::int32_t piece_begin) {
    const auto& n = core.node(index);
    core.for_each_run(
        n, 0, n.length,
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t done) {
          if (static_cast<std::int32_t>(pieces_.size()) > piece_begin) {
            Piece& last = pieces_.back();
            if (last.slot == slot && last.begin + last.length == offset) {
              last.length += run;  // split nodes of one path read as one
              return true;
            }
          }
          pieces_.push_back({slot, offset, run, n.position + done});
          return true;
        });
  }

  /// The free places behind a tail are its own: the piece covers them, so that it need not change
  /// until the slot is full.
  template <class Core>
  void extend_to_slot_end(const Core& core, NodeIndex tail, std::int32_t chunk_size) {
    if (!core.owns_end(core.node(tail))) return;
    Piece& last = pieces_.back();
    segments_.back().length += chunk_size - (last.begin + last.length);
    last.length = chunk_size - last.begin;
  }

  /// Where the new tokens' K/V go. Positions that are written, or another sequence's to write, are
  /// skipped.
  template <class Core>
  void set_writes(const Core& core, const Entry& entry) {
    for (std::int32_t i = 0; i < entry.queries.length; ++i)
      writes_[at(entry.token + i)] = {no_slot, 0};
    core.for_each_node(
        entry.sequence, entry.queries,
        [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
          const auto& n = core.node(index);
          if (n.writer != entry.sequence) return;
          const std::int32_t first = std::max(offset, n.written);
          const std::int32_t token = entry.token + n.position + first - entry.queries.begin;
          core.for_each_run(
              n, first, offset + length - first,
              [&](SlotIndex slot, std::int32_t place, std::int32_t run, std::int32_t done) {
                for (std::int32_t i = 0; i < run; ++i)
                  writes_[at(token + done + i)] = {slot, place + i};
                return true;
              });
        });
  }

  std::vector<Entry> entries_, built_;
  std::int32_t num_rows_ = 0;
  std::uint64_t built_for_ = 0;  // the tree's number, 0: nothing
  std::uint64_t built_version_ = 0;
  std::uint64_t step_ = 0, topology_ = 0, pieces_version_ = 0, num_rebuilds_ = 0;
  std::int32_t chunk_size_ = 0;

  std::vector<Segment> segments_;
  std::vector<Piece> pieces_;
  std::vector<std::int32_t> row_token_, row_kv_len_, row_segment_;
  std::vector<WriteTarget> writes_;
  std::vector<RowCopy> copies_;

  std::uint64_t mark_ = 0;
  std::vector<SequenceMark> entry_of_;  // by sequence
  std::vector<ActiveNode> nodes_;       // by node
  std::vector<Frame> stack_;
};

CHUNKATTN_NAMESPACE_END
