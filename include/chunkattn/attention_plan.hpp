// AttentionPlan: what one step computes, as plain arrays for the kernels (the paper's context,
// section 3.3, generated only when the tree's shape or the batch changed).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "detail/base/array.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/plan/active_nodes.hpp"
#include "detail/plan/check_current.hpp"
#include "detail/plan/draft_segments.hpp"
#include "error.hpp"
#include "plan_view.hpp"
#include "step.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Numbers topologies over all plans of the process, so that what a kernel keeps for one is never
/// taken for another's.
inline std::uint64_t next_topology() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace detail

/// The arrays of a step's plan, and what the model needs beside them. Ends with the step, or when
/// the plan builds another; is_current() tells.
template <class Tree>
class StepView : public LiveView {
 public:
  using token_type = typename Tree::token_type;  ///< what sequences are made of

  StepView() = default;
  /// A copy; one that is moved from stays as it is.
  StepView(const StepView&) = default;
  /// The same.
  StepView& operator=(const StepView&) = default;
  /// Whether there are any rows.
  [[nodiscard]] explicit operator bool() const noexcept { return num_rows > 0; }

  /// A query token whose value is the output of an earlier step that is not committed yet.
  struct UnknownToken {
    std::int32_t row = 0;       ///< in this step
    SequenceId sequence{};      ///< whose token it is
    std::int32_t position = 0;  ///< its path position
  };

  /// [num_rows] the tokens to compute, in the caller's row order: the model's input ids. Known
  /// drafts are what add() was given. A row whose output or draft was given up meanwhile, since a
  /// draft before it was wrong or an earlier step was dropped, counts for nothing: it has the token
  /// that the sequence has got at its position since then, or else is unknown.
  /// \param placeholder  stands for unknown_tokens(), which the engine fills in on the device
  [[nodiscard]] std::vector<token_type> tokens(const token_type& placeholder) const {
    std::vector<token_type> all;
    for_each_token([&](const detail::StepEntry&, std::int32_t, const token_type* token) {
      all.push_back(token != nullptr ? *token : placeholder);
    });
    return all;
  }
  /// The same where all are known; throws InvalidArgument where one is not.
  [[nodiscard]] std::vector<token_type> tokens() const {
    std::vector<token_type> all;
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type* token) {
      if (token == nullptr) [[unlikely]]
        detail::fail_argument("token at position", position,
                              "known tokens; this one is the output of a step that is not "
                              "committed: use tokens(placeholder) and unknown_tokens()");
      all.push_back(*token);
    });
    return all;
  }
  /// The query tokens that are not known to the tree yet.
  [[nodiscard]] std::vector<UnknownToken> unknown_tokens() const {
    std::vector<UnknownToken> unknown;
    std::int32_t row = 0;
    for_each_token(
        [&](const detail::StepEntry& entry, std::int32_t position, const token_type* token) {
          if (token == nullptr)
            unknown.push_back(
                {row, detail::Sequences::id_of(entry.sequence, entry.generation), position});
          ++row;
        });
    return unknown;
  }
  /// [num_rows] the tokens' path positions, in the caller's row order: for the rotary embedding.
  /// Drafts that are a tree stand as far behind the path as they are deep.
  [[nodiscard]] std::vector<std::int32_t> positions() const {
    std::vector<std::int32_t> all;
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type*) {
      all.push_back(position);
    });
    return all;
  }

 private:
  friend class AttentionPlan;
  StepView(const PlanView& arrays, std::shared_ptr<const detail::ViewTicket> ticket,
           const detail::StepHandle<Tree>& step)
      : LiveView(arrays, std::move(ticket)), shared_(step.shared()), step_(&step.record()) {}

  template <class F>
  void for_each_token(const F& f) const {
    detail::check_current(*this);
    if (step_ == nullptr) return;
    const Tree& tree = *shared_->tree;
    for (const detail::StepEntry& entry : step_->entries) {
      if (entry.first_row >= num_rows) return;  // added after the plan was built
      const std::span<const detail::Draft> drafts = step_->tree_of(entry);
      const std::int32_t end = drafts.empty() ? entry.end() : entry.output_position();
      for (std::int32_t p = entry.begin; p < end; ++p) f(entry, p, tree.known_token(entry, p));
      for (const detail::Draft& draft : drafts) {
        const std::int32_t p = entry.output_position() + draft.depth - 1;
        f(entry, p,
          tree.knows_drafts(entry) ? &tree.token_at(draft.slot, draft.offset)
                                   : tree.known_token(entry, p));
      }
    }
  }

  std::shared_ptr<detail::SharedTree<Tree>> shared_;
  const detail::StepRecord* step_ = nullptr;
};

/// The query tokens of one step and the K/V that each of them reads, as plain arrays.
///
/// Keep one plan over many steps, or, where a step still reads its plan on the host while the next
/// one is built, one for each of them in turn. A kept plan is cheap: if neither the tree's version
/// nor the list of (sequence, number of query tokens) changed since the last build, only lengths
/// advance: O(rows), nothing is allocated. Filling a chunk adds one piece to its sequence and is no
/// rebuild either.
class AttentionPlan {
 public:
  AttentionPlan() = default;
  /// Views of `other` go on with this one.
  AttentionPlan(AttentionPlan&& other) noexcept = default;
  /// Views of this plan go out of date.
  AttentionPlan& operator=(AttentionPlan&& other) noexcept {
    if (this != &other) {
      std::destroy_at(this);
      std::construct_at(this, std::move(other));
    }
    return *this;
  }
  ~AttentionPlan() {
    if (ticket_) ticket_->set(0);
  }

  /// Brings the arrays up to date with an open step, whose rows keep the order of Step::add().
  /// Views that this plan gave before, or another plan for this step, go out of date. The step's
  /// plan carries the row copies of forks made so far. False where the step has no rows.
  template <class Tree>
  [[nodiscard]] StepView<Tree> build(Step<Tree>& step) & {
    detail::TreeCore& core = step.handle_.core();
    detail::StepRecord& record = step.handle_.record();
    if (ticket_ == nullptr) ticket_ = std::make_shared<detail::ViewTicket>();
    ticket_->set(0);
    record.invalidate_view();  // another plan's: it may lack copies
    record.built = false;
    if (record.entries.empty()) return {};
    core.steps.carry_copies(record, arrays_.copies);
    const Entries entries = record.entries;
    const bool may_advance = built_for_ == core.id && built_version_ == core.sequences.version() &&
                             built_.size() == entries.size() && record.trees.empty();
    if (!may_advance || !advance(core, entries)) rebuild(core, record);
    PlanView view = arrays_.view();
    view.tree_id = core.id;
    view.step_number = record.number;
    if (auto& checks = *core.steps.write_checks(); checks.any()) [[unlikely]]
      checks.for_each([&](auto& check) { check.built(view.step_number, view.writes_anything()); });
    record.ticket_number = ++views_;
    ticket_->set(views_);
    record.ticket = ticket_;
    record.built = true;
    return {view, ticket_, step.handle_};
  }
  template <class Tree>
  StepView<Tree> build(Step<Tree>& step) && = delete;  // the view would read what is gone

  /// How often build() could not just advance.
  [[nodiscard]] std::uint64_t num_rebuilds() const noexcept { return num_rebuilds_; }

 private:
  using TreeCore = detail::TreeCore;
  using Entries = std::span<const detail::StepEntry>;

  /// What was built for an entry of the step.
  struct Built {
    detail::SequenceIndex sequence;
    std::uint32_t generation;
    std::int32_t length;           // query tokens
    std::int32_t row = 0;          // the plan's index of the first of them
    std::int32_t piece_limit = 0;  // end of the room for the sequence's own pieces
    std::int32_t covered = 0;      // path positions that the segments hold
  };

  static constexpr std::int32_t none = -1;
  static std::size_t at(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

  /// The common step: lengths grow, and now and then a tail gets one slot more. False if the
  /// entries are others, or a tail got its first place, which makes a new segment.
  bool advance(const TreeCore& core, Entries entries) {
    bool pieces_changed = false;
    std::int32_t* const row_kv_len = arrays_.row_kv_len.data();
    WriteTarget* const writes = arrays_.writes.data();
    Built* built = built_.data();
    for (const detail::StepEntry& entry : entries) {
      Built& row = *built++;
      if (entry.sequence != row.sequence || entry.generation != row.generation ||
          entry.length != row.length) [[unlikely]]
        return false;
      // Decoding within what the pieces cover, the output's place included.
      if (entry.slot != no_slot && entry.begin + 2 <= row.covered) [[likely]] {
        row_kv_len[row.row] = entry.begin + 1;
        writes[entry.first_row] = {entry.slot, entry.offset};
      } else if (!advance(core, entry, row, pieces_changed)) {
        return false;
      }
    }
    if (pieces_changed) ++arrays_.pieces_version;
    return true;
  }
  bool advance(const TreeCore& core, const detail::StepEntry& entry, Built& built,
               bool& pieces_changed) {
    const auto& tail = core.topology.node(core.sequences[entry.sequence].tail);
    Segment& segment = arrays_.segments[at(arrays_.row_segment[at(built.row)])];
    if (tail.end() > built.covered) {
      if (built.piece_limit == 0) return false;
      pieces_changed = true;
      while (tail.end() > segment.position + segment.length) append_piece(core, built, segment);
      built.covered = segment.position + segment.length;
    }
    for (std::int32_t i = 0; i < entry.length; ++i)
      arrays_.row_kv_len[at(built.row + i)] = entry.begin + i + 1;
    set_writes(core, entry);
    return true;
  }

  /// Adds the tail's next slot to its segment, moving the segment's pieces where they have room.
  void append_piece(const TreeCore& core, Built& built, Segment& segment) {
    if (segment.piece_begin + segment.piece_count == built.piece_limit) {
      const std::size_t begin = arrays_.pieces.size();
      arrays_.pieces.resize(begin + 2 * at(segment.piece_count) + at(slack(arrays_.chunk_size)),
                            Piece{});
      std::copy_n(arrays_.pieces.begin() + segment.piece_begin, segment.piece_count,
                  arrays_.pieces.begin() + static_cast<std::ptrdiff_t>(begin));
      segment.piece_begin = static_cast<std::int32_t>(begin);
      built.piece_limit = static_cast<std::int32_t>(arrays_.pieces.size());
    }
    const Piece& last = arrays_.pieces[at(segment.piece_begin + segment.piece_count - 1)];
    const SlotIndex next = core.slot_table.next(last.slot);
    arrays_.pieces[at(segment.piece_begin + segment.piece_count)] = {next, 0, arrays_.chunk_size,
                                                                     last.position + last.length};
    ++segment.piece_count;
    segment.length += arrays_.chunk_size;
  }

  /// Room left behind a tail's pieces: a thousand tokens before the first move.
  static constexpr std::int32_t slack(std::int32_t chunk_size) noexcept {
    return std::max(8, 1024 / chunk_size);
  }

  // ---- rebuilding: walk up from each tail, then depth-first down over what was touched ---------

  struct Frame {
    detail::NodeIndex next;  // child to visit
    std::int32_t segment;    // that its path runs through, none at the root
    bool leaves;             // on the way up: close `segment`
    std::int32_t sequences;  // seen before the segment was opened
  };

  void rebuild(const TreeCore& core, const detail::StepRecord& step) {
    const Entries entries = step.entries;
    const std::int32_t num_rows = step.num_rows;
    built_for_ = 0;  // until all is there: an allocation may fail
    arrays_.chunk_size = core.topology.chunk.size;
    arrays_.row_token.resize(at(num_rows));
    arrays_.row_kv_len.resize(at(num_rows));
    arrays_.row_segment.resize(at(num_rows));
    arrays_.writes.resize(at(num_rows));
    arrays_.segments.clear();
    arrays_.pieces.clear();
    built_.clear();
    for (const detail::StepEntry& entry : entries)
      built_.push_back({entry.sequence, entry.generation, entry.length});
    nodes_.link(core, entries);
    number_rows(core, step);
    for (const detail::StepEntry& entry : entries) {
      detail::StepEntry path = entry;
      if (!step.tree_of(entry).empty()) path.length -= entry.drafts;
      set_writes(core, path);
    }
    built_for_ = step.trees.empty() ? core.id : 0;  // trees are others in every step
    built_version_ = core.sequences.version();
    arrays_.topology = detail::next_topology();
    ++arrays_.pieces_version;
    ++num_rebuilds_;
  }

  void number_rows(const TreeCore& core, const detail::StepRecord& step) {
    std::int32_t row = 0, sequences = 0;
    stack_.clear();
    push_children(core, step, detail::root_node, none, row);
    while (!stack_.empty()) {
      const Frame frame = stack_.back();
      stack_.pop_back();
      if (frame.leaves) {
        arrays_.segments[at(frame.segment)].row_end = row;
        arrays_.segments[at(frame.segment)].num_sequences = sequences - frame.sequences;
        continue;
      }
      if (frame.next == none) continue;
      detail::NodeIndex n = frame.next;
      if (nodes_[n].next_sibling != none)
        stack_.push_back({nodes_[n].next_sibling, frame.segment, false, 0});

      // One segment for the unary run that starts here.
      const auto piece_begin = static_cast<std::int32_t>(arrays_.pieces.size());
      const std::int32_t position = core.topology.node(n).position;
      add_pieces(core, step, n, piece_begin);
      while (nodes_[n].first_child != none && nodes_[n].first_child == nodes_[n].last_child) {
        n = nodes_[n].first_child;
        add_pieces(core, step, n, piece_begin);
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
        push_children(core, step, n, segment, row);
        continue;
      }
      const detail::StepEntry& entry = step.entries[at(e)];
      const std::span<const detail::Draft> drafts = step.tree_of(entry);
      Built& built = built_[at(e)];
      if (piece_end > piece_begin) number_path(core, step, e, segment, row);
      if (core.topology.node(n).length > 0 && drafts.empty()) {
        extend_to_slot_end(core, n);
        arrays_.pieces.resize(arrays_.pieces.size() + at(slack(arrays_.chunk_size)), Piece{});
        built.piece_limit = static_cast<std::int32_t>(arrays_.pieces.size());
      }
      if (segment != none)
        built.covered =
            arrays_.segments[at(segment)].position + arrays_.segments[at(segment)].length;
      if (!drafts.empty() && counts(core, entry)) {
        draft_segments_.append(
            drafts, {first_draft(step, entry), row, entry.output_position(), segment}, arrays_);
        row += static_cast<std::int32_t>(drafts.size());
      }
      ++sequences;
    }
  }

  /// Visits the children of `n` next. The rows of tails without a place of their own end at
  /// `segment`, as those of drafts on a fork do: they come first, since the rows of a segment stand
  /// side by side.
  void push_children(const TreeCore& core, const detail::StepRecord& step, detail::NodeIndex n,
                     std::int32_t segment, std::int32_t& row) {
    const detail::NodeIndex first = nodes_[n].first_child;
    stack_.push_back({first, segment, false, 0});
    for (detail::NodeIndex child = first; child != none; child = nodes_[child].next_sibling)
      if (const std::int32_t e = nodes_[child].entry;
          e != none && num_places(core, step, child) <= 0)
        number_path(core, step, e, segment, row);
  }

  /// The rows of an entry that end at `segment`: all but those of drafts that have their own.
  void number_path(const TreeCore& core, const detail::StepRecord& step, std::int32_t e,
                   std::int32_t segment, std::int32_t& row) {
    const detail::StepEntry& entry = step.entries[at(e)];
    const std::span<const detail::Draft> drafts = step.tree_of(entry);
    built_[at(e)].row = row;
    for (std::int32_t token = entry.first_row; token < first_draft(step, entry); ++token, ++row) {
      arrays_.row_token[at(row)] = token;
      arrays_.row_kv_len[at(row)] = entry.begin + token - entry.first_row + 1;
      arrays_.row_segment[at(row)] = segment;
    }
    if (drafts.empty() || counts(core, entry)) return;
    draft_segments_.append_superseded(
        drafts, {first_draft(step, entry), row, entry.output_position(), segment}, arrays_);
    row += static_cast<std::int32_t>(drafts.size());
  }

  /// The first row, as the caller counts, of an entry's tree of drafts; or the end of its rows.
  static std::int32_t first_draft(const detail::StepRecord& step,
                                  const detail::StepEntry& entry) noexcept {
    return entry.first_row + entry.length - (step.tree_of(entry).empty() ? 0 : entry.drafts);
  }

  /// Whether the entry's rows are not superseded: else its path may have become shorter.
  static bool counts(const TreeCore& core, const detail::StepEntry& entry) noexcept {
    return entry.epoch == core.sequences[entry.sequence].epoch;
  }
  /// Places of a node that its segment holds: not those of a tree of drafts.
  std::int32_t num_places(const TreeCore& core, const detail::StepRecord& step,
                          detail::NodeIndex index) const noexcept {
    const auto& n = core.topology.node(index);
    if (const std::int32_t e = nodes_[index].entry; e != none && !step.trees.empty()) {
      const detail::StepEntry& entry = step.entries[at(e)];
      if (!step.tree_of(entry).empty() && counts(core, entry))
        return entry.output_position() - n.position;
    }
    return n.length;
  }
  void add_pieces(const TreeCore& core, const detail::StepRecord& step, detail::NodeIndex index,
                  std::int32_t piece_begin) {
    const auto& n = core.topology.node(index);
    core.topology.for_each_run(
        n, 0, num_places(core, step, index),
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t done) {
          if (static_cast<std::int32_t>(arrays_.pieces.size()) > piece_begin) {
            Piece& last = arrays_.pieces.back();
            if (last.slot == slot && last.begin + last.length == offset) {
              last.length += run;  // split nodes of one path read as one
              return true;
            }
          }
          arrays_.pieces.push_back({slot, offset, run, n.position + done});
          return true;
        });
  }

  /// The free places behind a tail are its own: the piece covers them, so that it need not change
  /// until the slot is full.
  void extend_to_slot_end(const TreeCore& core, detail::NodeIndex tail) {
    if (!core.topology.owns_end(core.topology.node(tail))) return;
    Piece& last = arrays_.pieces.back();
    arrays_.segments.back().length += arrays_.chunk_size - (last.begin + last.length);
    last.length = arrays_.chunk_size - last.begin;
  }

  /// Where the new tokens' K/V go. Positions that are written, or another sequence's to write, are
  /// skipped.
  void set_writes(const TreeCore& core, const detail::StepEntry& entry) {
    const auto& tail = core.topology.node(core.sequences[entry.sequence].tail);
    if (entry.length == 1 && entry.begin >= tail.position) {  // decode
      const std::int32_t offset = entry.begin - tail.position, place = tail.begin + offset;
      WriteTarget& target = arrays_.writes[at(entry.first_row)];
      if (tail.writer == entry.sequence && offset >= tail.written && offset < tail.length)
        target = {core.topology.slot_of(tail, place), core.topology.chunk.offset(place)};
      else
        target = {no_slot, 0};
      return;
    }
    for (std::int32_t i = 0; i < entry.length; ++i)
      arrays_.writes[at(entry.first_row + i)] = {no_slot, 0};
    core.sequences.for_each_node(
        entry.sequence, {entry.begin, entry.length},
        [&](detail::NodeIndex index, std::int32_t offset, std::int32_t length) {
          const auto& n = core.topology.node(index);
          if (n.writer != entry.sequence) return;
          const std::int32_t first = std::max(offset, n.written);
          const std::int32_t row = entry.first_row + n.position + first - entry.begin;
          core.topology.for_each_run(
              n, first, offset + length - first,
              [&](SlotIndex slot, std::int32_t place, std::int32_t run, std::int32_t done) {
                for (std::int32_t i = 0; i < run; ++i)
                  arrays_.writes[at(row + done + i)] = {slot, place + i};
                return true;
              });
        });
  }

  std::shared_ptr<detail::ViewTicket> ticket_;
  std::uint64_t views_ = 0;
  Array<Built> built_;
  std::uint64_t built_for_ = 0;  // the tree's number, 0: nothing
  std::uint64_t built_version_ = 0;
  std::uint64_t num_rebuilds_ = 0;
  PlanArrays arrays_;

  detail::ActiveNodes nodes_;
  Array<Frame> stack_;
  detail::DraftSegments draft_segments_;
};

CHUNKATTN_NAMESPACE_END
