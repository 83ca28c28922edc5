// A device for tests of steps: instead of K/V each slot holds which token of which path was
// computed there, so that every read can be checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"

namespace test {

/// What stands for the K/V of one token: a function of all tokens up to it.
struct Computed {
  std::int32_t position = -1;  ///< -1: nothing was ever written here, or it was freed
  std::int32_t token = 0;
  std::uint64_t chain = 0;  ///< of the tokens up to this one

  /// The next token of the path.
  [[nodiscard]] Computed next(std::int32_t next_token) const noexcept {
    std::uint64_t mixed = (chain + 0x51ed27u) ^ static_cast<std::uint32_t>(next_token);
    mixed *= 0x9e3779b97f4a7c15u;
    return {position + 1, next_token, mixed ^ (mixed >> 31)};
  }
  friend bool operator==(const Computed&, const Computed&) = default;
};

/// Runs the plans of one tree in the order in which they were queued, each when asked.
template <class Tree>
class StepDevice {
 public:
  using Sequence = typename Tree::Sequence;
  static constexpr int chunk_size = Tree::chunk_size;

  /// `vocabulary`: what is sampled is below it.
  explicit StepDevice(Tree& tree, int vocabulary = 1000)
      : slots_(std::make_shared<Slots>()), vocabulary_(vocabulary) {
    tree.set_free_sink([slots = slots_](chunkattn::ChunkIndex chunk) {
      for (int i = 0; i < chunk_size; ++i) slots->at(chunk, i) = {};
    });
  }

  /// Queues what the kernels do with the view.
  template <class View>
  void queue(const View& view) {
    Job job;
    job.copies.assign(view.copies, view.copies + view.num_copies);
    const auto tokens = view.tokens(-1);
    for (int r = 0; r < view.num_rows; ++r) {
      Row row;
      row.token = tokens[static_cast<std::size_t>(view.row_token[r])];
      row.target = view.writes[view.row_token[r]];
      row.kv_len = view.row_kv_len[r];
      for (int s = view.row_segment[r]; s != -1; s = view.segments[s].parent)
        for (int p = 0; p < view.segments[s].num_pieces; ++p) {
          chunkattn::Piece piece = view.pieces[view.segments[s].piece_begin + p];
          piece.length = chunkattn::visible_length(piece, row.kv_len);
          if (piece.length > 0) row.path.push_back(piece);
        }
      row.index = view.row_token[r];
      job.rows.push_back(std::move(row));
    }
    for (const auto& unknown : view.unknown_tokens())
      for (Row& row : job.rows)
        if (row.index == unknown.row) row.unknown = unknown.sequence;
    job.sequences.resize(job.rows.size());
    // Writers first: another row of the same position may read what they write.
    std::stable_sort(job.rows.begin(), job.rows.end(), [](const Row& a, const Row& b) {
      return std::pair(a.kv_len, a.target.chunk == chunkattn::no_chunk) <
             std::pair(b.kv_len, b.target.chunk == chunkattn::no_chunk);
    });
    jobs_.push_back(std::move(job));
  }
  /// Says whose rows are whose in the step queued last, so that outputs are found again.
  void name(const chunkattn::ScheduledSequence& row) {
    for (int i = 0; i < row.num_rows; ++i)
      jobs_.back().sequences[static_cast<std::size_t>(row.first_row + i)] = row.sequence;
  }

  /// Runs the oldest queued step.
  void run_next() {
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    for (const chunkattn::PlanView::RowCopy& copy : job.copies)
      for (int i = 0; i < copy.length; ++i) {
        const Computed row = slots_->at(copy.source_chunk, copy.source_begin + i);
        slots_->at(copy.target_chunk, copy.target_begin + i) = row;
      }
    for (const Row& row : job.rows) run(job, row);
  }
  void run_all() {
    while (!jobs_.empty()) run_next();
  }
  /// Forgets what was queued: the device was reset.
  void reset() { jobs_.clear(); }
  /// The step at this position of the queue never runs; what was queued after it reads what it
  /// finds.
  void lose(std::size_t at) {
    jobs_[at] = {};
    for (std::size_t i = at; i < jobs_.size(); ++i)
      for (Row& row : jobs_[i].rows) row.checked = false;
  }
  /// What is queued for the sequence starts on outputs that were discarded: nothing of it counts.
  void supersede(chunkattn::SequenceId sequence) {
    for (Job& job : jobs_)
      for (Row& row : job.rows)
        if (job.sequences[static_cast<std::size_t>(row.index)] == sequence) row.checked = false;
  }
  [[nodiscard]] std::size_t num_queued() const { return jobs_.size(); }

  /// Builds, runs and finishes a step in one go.
  template <class Step>
  typename Tree::Finished finish(chunkattn::AttentionPlan& plan, Step&& step,
                                 const std::vector<chunkattn::ScheduledSequence>& rows = {}) {
    queue(plan.build(step));
    for (const chunkattn::ScheduledSequence& row : rows) name(row);
    run_all();
    return std::move(step).finish();
  }

  /// What was sampled after the position of a sequence.
  [[nodiscard]] int sampled(chunkattn::SequenceId sequence, std::int32_t position) const {
    return sampled_.at({sequence, position});
  }
  /// The same for each output of a row, drafts included.
  [[nodiscard]] int sampled(const chunkattn::ScheduledSequence& row, int output) const {
    return sampled(row.sequence, row.position + row.num_rows - 1 - row.num_drafts + output);
  }

  /// Writes the K/V of a range, as if it had come from elsewhere.
  void load(const Sequence& sequence, chunkattn::TokenRange range) {
    for_each_slot(sequence, range, [](Computed& slot, const Computed& right) { slot = right; });
  }
  /// Positions below num_written() where something else stands.
  [[nodiscard]] int wrong(const Sequence& sequence) {
    int count = 0;
    for_each_slot(
        sequence, {0, static_cast<std::int32_t>(sequence.num_written())},
        [&](const Computed& slot, const Computed& right) { count += slot != right ? 1 : 0; });
    return count;
  }
  /// Rows that read, since the start, what was not their path's K/V.
  [[nodiscard]] int wrong_reads() const { return wrong_reads_; }
  /// Rows that were run.
  [[nodiscard]] int num_rows() const { return num_rows_; }

 private:
  struct Slots {
    std::vector<Computed> all;
    Computed& at(chunkattn::ChunkIndex chunk, int offset) {
      const auto index = static_cast<std::size_t>(chunk) * chunk_size;
      if (index >= all.size()) all.resize(index + chunk_size);
      return all[index + static_cast<std::size_t>(offset)];
    }
  };
  struct Row {
    std::vector<chunkattn::Piece> path;  // deepest segment first
    chunkattn::PlanView::WriteTarget target{};
    int token = 0, kv_len = 0, index = 0;
    chunkattn::SequenceId unknown = chunkattn::SequenceId::none;
    bool checked = true;
  };
  struct Job {
    std::vector<chunkattn::PlanView::RowCopy> copies;
    std::vector<Row> rows;
    std::vector<chunkattn::SequenceId> sequences;  // by row index
  };

  void run(const Job& job, const Row& row) {
    ++num_rows_;
    const int last = row.kv_len - 1;
    int token = row.token;
    bool right = true;
    if (row.unknown != chunkattn::SequenceId::none) {
      const auto output = sampled_.find({row.unknown, last - 1});
      right = output != sampled_.end();
      if (right) token = output->second;
    }
    std::vector<Computed> path(static_cast<std::size_t>(row.kv_len));
    const auto read = [&](int end) {
      for (const chunkattn::Piece& piece : row.path)
        for (int i = 0; i < piece.length && piece.position + i < end; ++i)
          path[static_cast<std::size_t>(piece.position + i)] =
              slots_->at(piece.chunk, piece.begin + i);
    };
    read(last);
    Computed at;
    for (int p = 0; p < last; ++p) {
      const Computed& found = path[static_cast<std::size_t>(p)];
      right = right && found == at.next(found.token);
      at = found;
    }
    const Computed own = at.next(token);
    if (row.target.chunk != chunkattn::no_chunk)
      slots_->at(row.target.chunk, row.target.offset) = own;
    read(row.kv_len);
    right = right && path.back() == own;
    wrong_reads_ += right || !row.checked ? 0 : 1;
    const chunkattn::SequenceId sequence = job.sequences[static_cast<std::size_t>(row.index)];
    if (sequence != chunkattn::SequenceId::none)
      sampled_[{sequence, last}] =
          static_cast<int>((own.chain >> 20) % static_cast<std::uint64_t>(vocabulary_));
  }

  template <class F>
  void for_each_slot(const Sequence& sequence, chunkattn::TokenRange range, const F& f) {
    const auto tokens = sequence.tokens();
    std::vector<Computed> right{{}};
    for (const auto token : tokens) right.push_back(right.back().next(token));
    sequence.for_each_run(range, [&](const chunkattn::Piece& piece) {
      for (int i = 0; i < piece.length; ++i)
        f(slots_->at(piece.chunk, piece.begin + i),
          right[static_cast<std::size_t>(piece.position + i + 1)]);
    });
  }

  std::shared_ptr<Slots> slots_;
  std::deque<Job> jobs_;
  std::map<std::pair<chunkattn::SequenceId, std::int32_t>, int> sampled_;
  int vocabulary_, wrong_reads_ = 0, num_rows_ = 0;
};

}  // namespace test
