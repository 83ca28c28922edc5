// The server: iteration-based batching over one layer of attention. In each step every live request
// has rows: prompt tokens that are not in the cache yet, or its latest token.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../support/cuda_attention.hpp"
#include "../support/machine_limits.hpp"
#include "../support/table.hpp"
#include "stand_in.hpp"

namespace shared_prompt {

/// A request as the server sees it: token ids.
struct Job {
  std::string title;
  std::vector<std::int32_t> prompt, reply;
  int join_step = 0;
};

/// What a full batch looks like at one step: given to the measurements.
template <class T>
struct Moment {
  int step = 0;
  chunkattn::LiveView plan;
  chunkattn::KvView<T> kv;
  std::span<const float> q;       ///< [rows][num_qo_heads][head_dim], the caller's order
  std::vector<std::size_t> jobs;  ///< of each row, in the caller's order
  chunkattn::TreeStats tree;
};

struct ServeReport {
  int steps = 0;
  std::size_t prompt_tokens = 0, computed_tokens = 0, generated_tokens = 0;
  std::size_t peak_live = 0, peak_chunks = 0;
  std::uint64_t plan_rebuilds = 0;
  double prefill_ms = 0;          ///< attention of steps that had prompt rows
  std::vector<double> decode_ms;  ///< attention of steps that had none
  std::vector<double> update_us;  ///< plan updates of the same steps
  double total_ms = 0;
};

template <class T, int HeadDim, int ChunkSize>
class Server {
 public:
  using Tree = chunkattn::PrefixTree<std::int32_t, ChunkSize>;

  /// \param gpu  where attention runs, if not null; K and V are kept on the host all the same
  Server(chunkattn::ThreadPool& executor, int num_qo_heads, int num_kv_heads, int prefill_chunk,
         examples::CudaAttention* gpu = nullptr)
      : executor_(executor),
        gpu_(gpu),
        stand_in_(num_qo_heads, num_kv_heads, HeadDim),
        prefill_chunk_(static_cast<std::size_t>(prefill_chunk)),
        cache_(tree_, {.num_layers = 1, .num_kv_heads = num_kv_heads, .head_dim = HeadDim}),
        attention_(executor) {}

  /// Serves all jobs; calls at_peak(Moment<T>) in the step before the first one leaves, when the
  /// most are live.
  template <class AtPeak>
  ServeReport run(const std::vector<Job>& jobs, AtPeak&& at_peak) {
    ServeReport report;
    std::vector<Live> live;
    std::size_t joined = 0, left = 0;
    bool measured = false;
    double at_peak_ms = 0;
    for (const Job& job : jobs) report.prompt_tokens += job.prompt.size();

    progress_header();
    report.total_ms = examples::milliseconds([&] {
      for (int number = 0; joined < jobs.size() || !live.empty(); ++number) {
        for (; joined < jobs.size() && (jobs[joined].join_step <= number || live.empty()); ++joined)
          live.push_back({joined, tree_.insert(jobs[joined].prompt)});
        typename Tree::Step step = tree_.begin_step();
        const StepShape shape = fill(step, jobs, live);
        typename Tree::StepView view;
        const double update_ms = examples::milliseconds([&] { view = plan_.build(step); });
        project(view);
        const auto layer = cache_.layer(0);
        attention_.write(layer, view, k_, v_);
        const double ms = attend(layer, view);
        report.computed_tokens += shape.prompt_rows;
        report.generated_tokens += shape.rows - shape.prompt_rows;
        report.peak_live = std::max(report.peak_live, live.size());
        report.peak_chunks = std::max(report.peak_chunks, tree_.num_chunks());
        if (shape.prompt_rows != 0) {
          report.prefill_ms += ms;
        } else {
          report.decode_ms.push_back(ms);
          report.update_us.push_back(update_ms * 1e3);
        }
        progress(number, live.size(), jobs.size() - joined, left, shape, ms);

        // The first step in which somebody says the last word: the batch is as full as it gets.
        if (!measured && joined == jobs.size() && shape.prompt_rows == 0 &&
            shape.rows == live.size() && shape.leaving != 0) {
          measured = true;
          std::vector<std::size_t> rows;
          for (const Live& one : live) rows.push_back(one.job);
          finish_progress();
          at_peak_ms = examples::milliseconds(
              [&] { at_peak(Moment<T>{number, view, layer, q_, std::move(rows), tree_.stats()}); });
          progress_header();
        }
        commit(std::move(step).finish(), jobs);
        left +=
            static_cast<std::size_t>(std::erase_if(live, [](const Live& one) { return one.done; }));
        ++report.steps;
      }
      finish_progress();
    });
    report.total_ms -= at_peak_ms;
    report.plan_rebuilds = plan_.num_rebuilds();
    return report;
  }

  [[nodiscard]] chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim>& attention() {
    return attention_;
  }

 private:
  struct Live {
    std::size_t job;
    typename Tree::Sequence sequence;
    bool done = false;
  };
  struct StepShape {
    std::size_t rows = 0, prompt_rows = 0, waiting = 0, leaving = 0;
  };

  /// Returns milliseconds.
  double attend(const chunkattn::KvView<T>& layer, const chunkattn::LiveView& view) {
    if (gpu_ == nullptr)
      return examples::milliseconds([&] { attention_.run(layer, view, q_, out_); });
    gpu_->write(0, view, tree_.num_chunks(), k_, v_);
    return gpu_->run(0, view, q_, out_);
  }

  StepShape fill(typename Tree::Step& step, const std::vector<Job>& jobs, std::vector<Live>& live) {
    StepShape shape;
    in_step_.clear();
    for (Live& one : live) {
      const auto added = step.add(one.sequence, prefill_chunk_);
      if (!added) {  // somebody is computing a prefix that this one needs: wait until it is there
        ++shape.waiting;
        continue;
      }
      in_step_.push_back(&one);
      const Job& job = jobs[one.job];
      const auto length = static_cast<std::size_t>(added.row().num_rows);
      shape.rows += length;
      if (one.sequence.size() == job.prompt.size()) shape.prompt_rows += length;
      if (one.sequence.size() == job.prompt.size() + job.reply.size()) ++shape.leaving;
    }
    return shape;
  }

  /// q, k and v of the step's rows, in the order in which sequences were added.
  void project(const typename Tree::StepView& view) {
    tokens_.resize(static_cast<std::size_t>(view.num_rows));
    positions_.resize(tokens_.size());
    view.copy_tokens(tokens_);
    view.copy_positions(positions_);
    q_.resize(tokens_.size() * stand_in_.q_size());
    out_.resize(q_.size());
    k_.resize(tokens_.size() * stand_in_.kv_size());
    v_.resize(k_.size());
    executor_.parallel_for(view.num_rows, [&](int i) {
      const auto row = static_cast<std::size_t>(i);
      StandIn::project(tokens_[row], positions_[row],
                       std::span(q_).subspan(row * stand_in_.q_size(), stand_in_.q_size()),
                       std::span(k_).subspan(row * stand_in_.kv_size(), stand_in_.kv_size()),
                       std::span(v_).subspan(row * stand_in_.kv_size(), stand_in_.kv_size()));
    });
  }

  /// What is "sampled" is the reply's next token; after its last one the model says the end.
  void commit(typename Tree::Finished finished, const std::vector<Job>& jobs) {
    for (const chunkattn::ScheduledSequence& row : finished.rows()) {
      Live& one = *in_step_[static_cast<std::size_t>(row.index)];
      const Job& job = jobs[one.job];
      const std::size_t replied = one.sequence.size() - job.prompt.size();
      one.done = replied == job.reply.size();
      if (!one.done) finished.commit(row, job.reply[replied]);
    }
  }

  static void progress_header() {
    fmt::print("  {}\n",
               examples::dim(fmt::format("{:>4}  {:>7}  {:>4}  {:>4}  {:>11}  {:>11}  {:>9}  {}",
                                         "step", "to come", "live", "done", "prompt rows",
                                         "decode rows", "attention", "done · live ■")));
  }

  void progress(int step, std::size_t live, std::size_t to_come, std::size_t left,
                const StepShape& shape, double ms) {
    if (!examples::on_terminal() && step % 10 != 0 && shape.prompt_rows < 64) return;
    constexpr std::size_t bar_width = 13;  // of 80 columns in all
    const std::size_t total = live + to_come + left;
    const auto part = [&](std::size_t count) { return count * bar_width / total; };
    std::string bar;
    for (std::size_t i = 0; i < part(left); ++i) bar += "·";
    for (std::size_t i = part(left); i < part(left + live); ++i) bar += "■";
    const std::string line =
        fmt::format("  {:>4}  {:>7}  {:>4}  {:>4}  {:>11}  {:>11}  {:>6.2f} ms  {}", step, to_come,
                    live, left, shape.prompt_rows, shape.rows - shape.prompt_rows, ms, bar);
    // One line of the terminal: what wraps could not be rewritten.
    const std::string shown = examples::clipped(line, examples::terminal_width());
    if (examples::on_terminal()) {
      fmt::print("\r\x1b[K{}", shown);
      line_open_ = true;
      std::fflush(stdout);
    } else {
      fmt::print("{}\n", shown);
    }
  }
  void finish_progress() {
    if (line_open_) fmt::print("\n");
    line_open_ = false;
    std::fflush(stdout);
  }

  chunkattn::ThreadPool& executor_;
  examples::CudaAttention* gpu_;
  StandIn stand_in_;
  std::size_t prefill_chunk_;
  Tree tree_{{}, {}, {.retains = false}};
  chunkattn::KvCache<chunkattn::Cpu, T> cache_;
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> attention_;
  chunkattn::AttentionPlan plan_;
  std::vector<std::int32_t> tokens_, positions_;  // of the step's rows
  std::vector<float> q_, k_, v_, out_;
  std::vector<Live*> in_step_;  // by ScheduledSequence::index
  bool line_open_ = false;
};

}  // namespace shared_prompt
