// The CPU backend as far as it depends on the instruction set: what a call does once its arguments
// are checked.
#ifndef CHUNKATTN_ISA_ENGINE
#define CHUNKATTN_ISA_ENGINE

#include "byte_unit.hpp"
#include "chunk_first.hpp"
#include "dot_first.hpp"
#include "dots.hpp"
#include "elements.hpp"
#include "int16_stream.hpp"
#include "int16_unit.hpp"
#include "line_state.hpp"
#include "line_total.hpp"
#include "pair_unit.hpp"
#include "partial_results.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "sequence_first.hpp"
#include "simd.hpp"
#include "tile_first.hpp"
#include "tiles.hpp"
#include "write.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

template <int HeadDim, int ValueDim>
class ByteUnit;
template <int HeadDim, int ValueDim>
class Int16Unit;
template <int HeadDim, int ValueDim>
struct PairUnit;
/// What computes products over int8 K and V, where there is something.
template <int HeadDim, int ValueDim>
using IntegerProducts =
    std::conditional_t<has_int16, Int16Unit<HeadDim, ValueDim>, ByteUnit<HeadDim, ValueDim>>;

/// Computes calls of one object. After the largest plan has been seen, nothing is allocated.
template <int HeadDim, int ValueDim>
class Engine {
 public:
  static constexpr InstructionSet instruction_set = InstructionSet::CHUNKATTN_PASS;

  explicit Engine(const CpuOptions& options)
      : options_(options),
        tile_terms_(wanted_terms(Tiles::runs_on(options.instruction_set), options)),
        byte_terms_(wanted_terms(runs_dots(), options)),
        pair_terms_(wanted_terms(runs_pairs(options.instruction_set), options)) {}

  /// write_rows().
  template <class T, class K, class V>
  void write(const ExecutorRef& executor, const KvView<T>& layer, const PlanView& plan,
             const HeadRows<const K>& k, const HeadRows<const V>& v) {
    write_rows<HeadDim, ValueDim>(executor, layer, plan, k, v);
  }

  template <class T, class X, class Y, class V>
  void run(const ExecutorRef& executor, const Call<T, X, Y, V>& call) {
    const int threads = (std::max)(1, executor.concurrency());
    prepare(call, threads);
    std::atomic<int> next{0};
    executor.parallel_for((std::min)(tasks_.size(), static_cast<int>(workers_.size())),
                          [&](int worker) {
                            State& state = workers_[to_size(worker)];
                            Tiles tiles(uses_tiles<T>());
                            Task task;
                            while (tasks_.take(next, task)) run_splits(call, task, state, tiles);
                          });
  }

  /// How the last run() was cut into tasks.
  [[nodiscard]] const Schedule& schedule() const noexcept { return schedule_; }

  /// Fills what was left in memory that calls write before they read it: see LineState::poison().
  void poison(float value) noexcept {
    for (State& worker : workers_) worker.poison(value);
    partials_.poison(value);
  }

  /// Whether products over K and V of T go through tiles, if lines are many. Those of int8 are
  /// faster and more accurate by dot products, which every processor with AMX has.
  template <class T>
  [[nodiscard]] bool uses_tiles() const noexcept {
    return fits_tiles<HeadDim, ValueDim, T> && tile_terms_ > 0 &&
           (software_tiles > 0 || !uses_dots<T>());
  }
  /// Whether they go through dot products.
  template <class T>
  [[nodiscard]] bool uses_dots() const noexcept {
    return fits_dots<HeadDim, T> && byte_terms_ > 0;
  }
  /// The terms of probabilities where products go through dot products of pairs, else 0. With two,
  /// they do for queries alone that are bfloat16 by value.
  template <class T>
  [[nodiscard]] int pair_terms() const noexcept {
    return fits_pairs<T> ? pair_terms_ : 0;
  }

 private:
  // Whether a row's bits may depend on its own tokens alone.
  [[nodiscard]] bool invariant() const noexcept {
    return options_.reduce == Reduce::batch_invariant;
  }

  using State = LineState<HeadDim, ValueDim>;
  using Partials = PartialResults<State>;
  // Dot products of int16 come with no matrix unit but its model, whose rounding is another.
  template <class T>
  static constexpr bool int16_stream = has_int16 && software_tiles == 0 && fits_dots<HeadDim, T>;
  // How far streams are prefetched ahead: measured on Zen 3 (AVX2), Zen 4 and 5 (AVX-512), where
  // other distances were 4 to 30 % slower. Dot products soon read all rows of V, column by column.
  template <class T>
  static constexpr int stream_kb = int16_stream<T>                                  ? 10
                                   : (sizeof(T) == 1) == (simd::native_width == 16) ? 16
                                                                                    : 6;
  template <class T>
  using Ahead = Prefetcher<HeadDim, ValueDim, T, stream_kb<T> * 1024 / 64>;

  // Lines of one task: their state (queries twice, outputs) should fit in half of a usual L2.
  static constexpr int max_lines = 2 * HeadDim + ValueDim <= 384 ? 256 : 128;
  // From this many lines on, matrix products beat streaming the lines a few at a time, if they use
  // this part of the vectors: whole grains are computed, with AVX2 two vectors, which take as long
  // as one.
  template <class T>
  static constexpr int min_product_lines = sizeof(T) == 4 ? 5 : 13;
  template <class T>
  static constexpr double min_product_fill = sizeof(T) == 4 ? 0.53 : 0.7;
  static constexpr int product_grain = (std::min)(16, tile_lines);
  // From how many lines of a row block on its products go through tiles, those of blocks that fewer
  // lines read, too: its queries are packed one way. V is packed once per block, for few lines at a
  // greater cost than that of multiplying by vectors. And the lines that make up for it, below
  // which rows are not cut. Measured on the Intel of docs/cpu.md.
  template <class T>
  static constexpr int min_matrix_lines = software_tiles > 0            ? software_tiles
                                          : std::is_same_v<T, bfloat16> ? 32
                                                                        : 48;
  static constexpr int matrix_block_lines = 128;
  template <class T>
  [[nodiscard]] bool takes_tiles(int lines) const noexcept {
    return uses_tiles<T>() && lines >= min_matrix_lines<T>;
  }
  // And through dot products, of bytes or pairs.
  static constexpr int min_dot_lines = 7;
  static constexpr int dot_flops_per_ns = 250;
  static constexpr int two_term_flops_per_ns = 190;

  // The terms of the operands of a unit that this processor has; 0: the unit is not used.
  static int wanted_terms(bool has_unit, const CpuOptions& options) noexcept {
    if (!has_unit || options.reduce == Reduce::batch_invariant) return 0;
    return options.accuracy == Accuracy::fp32 ? 0 : options.accuracy == Accuracy::one_term ? 1 : 2;
  }
  // The terms if all queries of X can be pairs.
  template <class T, class X>
  [[nodiscard]] int sure_pair_terms() const noexcept {
    return std::is_same_v<X, bfloat16> || pair_terms<T>() == 1 ? pair_terms<T>() : 0;
  }

  // Derives the tasks and makes room for them. Allocates only beyond what was seen before.
  template <class T, class X, class Y, class V>
  void prepare(const Call<T, X, Y, V>& call, int threads) {
    const PlanView& plan = call.plan;
    const int num_kv_heads = call.kv.num_kv_heads;
    const int group = call.group;
    constexpr int enough_tasks = 64;
    const int min_tasks = options_.tuning.min_tasks.value_or(
        options_.reduce == Reduce::deterministic ? enough_tasks : 4 * threads);
    ScheduleOptions wanted;
    wanted.num_kv_heads = num_kv_heads;
    wanted.group = group;
    wanted.max_lines = max_lines;
    if (options_.tuning.min_product_lines) {
      wanted.min_product_lines = *options_.tuning.min_product_lines;
    } else if (uses_dots<T>() || sure_pair_terms<T, X>() > 0) {
      wanted.min_product_lines = min_dot_lines;
    } else {
      wanted.min_product_lines = min_product_lines<T>;
      wanted.min_product_fill = min_product_fill<T>;
      wanted.product_grain = product_grain;
    }
    wanted.tile_lines = takes_tiles<T>(plan.num_rows * group) ? matrix_block_lines : tile_lines;
    wanted.min_tasks = min_tasks;
    if (!options_.tuning.min_tasks) wanted.min_free_tasks = enough_tasks;
    wanted.invariant = invariant();
    wanted.cost.bytes_per_token = (HeadDim + ValueDim) * static_cast<double>(sizeof(T));
    wanted.cost.flops_per_token_line = 2.0 * (HeadDim + ValueDim);
    if (uses_dots<T>() || sure_pair_terms<T, X>() == 1)
      wanted.cost.product_flops_per_ns = dot_flops_per_ns;
    else if (sure_pair_terms<T, X>() == 2)
      wanted.cost.product_flops_per_ns = two_term_flops_per_ns;
    if constexpr (SkipsKeys<V>) {
      hidden_.resize(to_size(plan.num_rows));
      for (int row = 0; row < plan.num_rows; ++row)
        hidden_[to_size(row)] = call.variant.masked(plan.row_kv_len[row] - 1);
      wanted.hidden = hidden_.data();
    }
    schedule_.derive(plan, wanted);

    // Products are computed head by head, so that the head's private tails come in meanwhile.
    const auto& row_blocks = schedule_.row_blocks();
    prepare_tasks(static_cast<int>(row_blocks.size()), num_kv_heads, threads, [&](int b) {
      const RowBlock& block = row_blocks[to_size(b)];
      const int lines = block.num_rows() * group;
      const int heads = block.has_products ? 1 : max_lines / lines;
      return std::pair(JobSize{block.cost, block.split_count, heads}, lines);
    });
    if (schedule_.num_partial_rows() > 0)
      partials_.reset(schedule_, plan.num_rows, num_kv_heads, group,
                      options_.reduce == Reduce::deterministic);
  }

  // Queues jobs and makes room for their state. `size` gives a job's JobSize and its lines per
  // head.
  template <class Size>
  void prepare_tasks(int num_jobs, int num_kv_heads, int threads, const Size& size) {
    const int limit =
        (std::min)(options_.tuning.max_task_heads.value_or(num_kv_heads), num_kv_heads);
    int most_lines = 0;
    tasks_.reset(num_jobs, num_kv_heads, threads, [&](int j) {
      auto [job, lines] = size(j);
      job.max_heads = std::clamp(job.max_heads, 1, limit);
      most_lines = (std::max)(most_lines, job.max_heads * lines);
      return job;
    });
    if (workers_.size() < to_size(threads)) workers_.resize(to_size(threads));
    for (State& worker : workers_) worker.reserve(most_lines);
  }

  // Some splits of a row block, for some heads, from the queries to results or partial results.
  template <class T, class X, class Y, class V>
  void run_splits(const Call<T, X, Y, V>& call, const Task& task, State& state,
                  Tiles& tiles) noexcept {
    const RowBlock& block = schedule_.row_blocks()[to_size(task.job)];
    const Split* const splits = schedule_.splits().data() + block.split_begin;
    const bool whole = task.part_end - task.part_begin == block.split_count;
    // Splits of their own, merged in order, so that it does not matter who computed which.
    const bool ordered = options_.reduce == Reduce::deterministic && block.split_count > 1;
    TaskLines lines{block.row_begin, block.row_end, task.head_begin, task.head_end, call.group};
    if (!whole) {
      lines.row_begin = block.row_end, lines.row_end = block.row_begin;  // none yet
      for (int u = task.part_begin; u < task.part_end; ++u) {
        lines.row_begin = (std::min)(lines.row_begin, splits[u].row_begin);
        lines.row_end = (std::max)(lines.row_end, splits[u].row_end);
      }
    }
    load_queries(call, lines, state);
    if (block.has_products) arrange_queries(call, block, lines, state);
    if (ordered && whole) Partials::clear(state.merged, lines.count());
    for (int u = task.part_begin; u < task.part_end; ++u) {
      if (ordered && u > task.part_begin) clear(splits[u], lines, state);
      run_split(call, splits[u], lines, state, tiles);
      if (ordered || u + 1 == task.part_end) state.close(lines.count());
      if (ordered && whole) Partials::merge_split(splits[u], lines, state);
      if (ordered && !whole) partials_.store_split(splits[u], lines, state);
    }

    if (whole) {
      finish_lines(call, lines, ordered, state);
      return;
    }
    const int head = task.head_begin;
    const int num_splits = task.part_end - task.part_begin;
    const bool last = ordered ? partials_.report_finished(task.job, head, num_splits)
                              : partials_.merge_under_lock(task.job, num_splits, lines, state);
    if (!last) return;
    const auto finish = [&](int row, int l, LineTotal<ValueDim> result) {
      finish_partial(call, row, head * call.group + l, result);
    };
    if (ordered)
      partials_.finish_stored(block, splits, head, finish);
    else
      partials_.finish_last(block, lines, state, finish);
  }

  // Empties the states that a split before this one may have left.
  static void clear(const Split& split, const TaskLines& lines, State& state) noexcept {
    for (int head = lines.head_begin; head < lines.head_end; ++head)
      state.clear(lines.line(head, split.row_begin), lines.line(head, split.row_end));
  }

  static std::int64_t num_tokens(const WorkItem* item, const WorkItem* end) noexcept {
    std::int64_t total = 0;
    for (; item != end; ++item) total += item->token_end - item->token_begin;
    return total;
  }

  // Adds what a split's items contribute to the state of the lines.
  template <class T, class X, class Y, class V>
  void run_split(const Call<T, X, Y, V>& call, const Split& split, const TaskLines& lines,
                 State& state, Tiles& tiles) noexcept {
    const WorkItem* const items = schedule_.items().data();
    ItemWalk products(call.plan, items + split.item_begin, items + split.stream_begin);
    ItemWalk streams(call.plan, items + split.stream_begin, items + split.item_end);
    Ahead<T> ahead(call.kv, lines.head_begin, lines.head_end, products,
                   num_tokens(items + split.item_begin, items + split.stream_begin), streams,
                   num_tokens(items + split.stream_begin, items + split.item_end));
    ahead.start();
    const auto rules = rules_of(call.variant, state);
    BlockSpan span;
    while (products.next(span)) {
      Block<T> block(span, call.kv, lines.head_begin);
      const int num_lines = (span.row_end - span.row_begin) * call.group;
      ahead.grant_product(span.count, num_lines,
                          state.has_tiles                     ? 280
                          : uses_dots<T>() || state.has_pairs ? 180
                                                              : 100);
      const int line = lines.line(lines.head_begin, span.row_begin);
      state.enter(span.position, line, num_lines);
      add_product(block, line, num_lines, state, tiles, ahead.cursor, rules);
      ahead.settle();
    }
    stream(call, streams, lines, state, ahead);
  }

  // One block for lines [line, line + num_lines), by tiles, dot products or vectors.
  template <class T, class Rules>
  void add_product(Block<T>& block, int line, int num_lines, State& state,
                   [[maybe_unused]] Tiles& tiles, PrefetchCursor& ahead,
                   Rules rules) const noexcept {
    if constexpr (fits_tiles<HeadDim, ValueDim, T>)
      if (state.has_tiles)
        return tile_first_block(block, line, num_lines, tile_terms_, state, tiles, ahead, rules);
    if constexpr (fits_dots<HeadDim, T>)
      if (uses_dots<T>())
        return dot_first_block(IntegerProducts<HeadDim, ValueDim>(), block, line, num_lines, state,
                               ahead, rules);
    if constexpr (fits_pairs<T>)
      if (state.has_pairs)
        return dot_first_block(PairUnit<HeadDim, ValueDim>{*options_.sm_scale, pair_terms_}, block,
                               line, num_lines, state, ahead, rules);
    chunk_first_block(block, line, num_lines, invariant(), state, ahead, rules);
  }

  // One block for lines [line, line + num_lines), as it lies in memory.
  template <class T, class Rules>
  void add_stream(Block<T>& block, int line, int num_lines, State& state, PrefetchCursor& ahead,
                  Rules rules) const noexcept {
    if constexpr (int16_stream<T>)
      if (uses_dots<T>())
        return int16_sequence_first_block(block, line, num_lines, state, ahead, rules);
    sequence_first_block(block, line, num_lines, state, ahead, rules);
  }

  // Streams the blocks of a walk, each for all heads of the task, as they lie in memory.
  template <class T, class X, class Y, class V>
  void stream(const Call<T, X, Y, V>& call, ItemWalk& walk, const TaskLines& lines, State& state,
              Ahead<T>& ahead) noexcept {
    const auto rules = rules_of(call.variant, state);
    BlockSpan span;
    while (walk.next(span)) {
      const int num_lines = (span.row_end - span.row_begin) * call.group;
      for (int head = lines.head_begin; head < lines.head_end; ++head) {
        Block<T> block(span, call.kv, head);
        ahead.grant_stream(span.count);
        const int line = lines.line(head, span.row_begin);
        state.enter(span.position, line, num_lines);
        add_stream(block, line, num_lines, state, ahead.cursor, rules);
        ahead.settle();
      }
    }
  }

  // The state of a task's lines before anything is seen, and their queries as scaled floats.
  template <class T, class X, class Y, class V>
  void load_queries(const Call<T, X, Y, V>& call, const TaskLines& lines, State& state) noexcept {
    constexpr int width = simd::width_for<HeadDim>;
    const int runs = call.q.stride_head == HeadDim ? 1 : call.group;  // of neighbouring elements
    const int run_lines = call.group / runs;
    state.clear(0, lines.count());
    for (int row = lines.row_begin; row < lines.row_end; ++row) {
      for (int head = lines.head_begin; head < lines.head_end; ++head) {
        const int line = lines.line(head, row);
        std::fill_n(state.kv_len + line, call.group, call.plan.row_kv_len[row]);
        if constexpr (!std::is_same_v<V, NoVariant>) {
          std::fill_n(state.row + line, call.group, call.plan.row_token[row]);
          for (int l = 0; l < call.group; ++l) state.head[line + l] = head * call.group + l;
        }
        for (int l = 0; l < call.group; l += run_lines) {
          const X* const from = call.query(row, head * call.group + l);
          float* const to = state.q + (line + l) * HeadDim;
          for (int i = 0; i < run_lines * HeadDim; i += width)
            simd::store(to + i, simd::load_widened<width>(from + i) *
                                    simd::broadcast<width>(*options_.sm_scale));
        }
      }
    }
    if constexpr (int16_stream<T>)
      if (uses_dots<T>()) pack_stream_queries(lines.count(), state);
    if constexpr (!std::is_same_v<V, NoVariant>) {  // vectors of lines reach beyond the last
      const int end = lines.count();
      std::fill_n(state.kv_len + end, tile_lines, 0);
      std::fill_n(state.row + end, tile_lines, state.row[end - 1]);
      std::fill_n(state.head + end, tile_lines, state.head[end - 1]);
    }
  }

  // The queries of the first lines once more, as products need them. What computes these depends on
  // the whole row block, whichever of its splits the task has: so bits do not depend on threads.
  template <class T, class X, class Y, class V>
  void arrange_queries(const Call<T, X, Y, V>& call, const RowBlock& block, const TaskLines& lines,
                       State& state) const noexcept {
    const int count = lines.per_head();
    state.has_pairs = false;
    state.has_tiles = takes_tiles<T>(block.num_rows() * call.group);
    if constexpr (fits_tiles<HeadDim, ValueDim, T>)
      if (state.has_tiles) return pack_queries(count, tile_terms_, state);
    if constexpr (fits_dots<HeadDim, T>)
      if (uses_dots<T>()) return IntegerProducts<HeadDim, ValueDim>::pack_queries(count, state);
    if constexpr (fits_pairs<T>) {
      state.has_pairs = pair_terms_ == 1 ||
                        (pair_terms_ > 1 &&
                         PairUnit<HeadDim, ValueDim>::holds_queries(call, block, lines.head_begin));
      if (state.has_pairs) {
        const auto row = [&](int line) CHUNKATTN_LAMBDA {
          const int first = lines.head_begin * call.group + line % call.group;
          return call.query(lines.row_begin + line / call.group, first);
        };
        return pack_pair_queries(count, state, row);
      }
    }
    transpose_queries(count, state);
  }
  static void transpose_queries(int lines, State& state) noexcept {
    for (int line = 0; line < lines; line += simd::native_width)  // those beyond the last: padding
      transpose_words<HeadDim>(state.q + line * HeadDim, HeadDim * sizeof(float),
                               state.q_transposed + line, state.transposed_stride);
  }

  // Writes the results of a task that had its lines to itself, from state.merged if it merged
  // splits.
  template <class T, class X, class Y, class V>
  void finish_lines(const Call<T, X, Y, V>& call, const TaskLines& lines, bool merged,
                    State& state) noexcept {
    for (int row = lines.row_begin; row < lines.row_end; ++row) {
      for (int head = lines.head_begin; head < lines.head_end; ++head) {
        for (int l = 0; l < call.group; ++l) {
          const int line = lines.line(head, row) + l;
          const int qo_head = head * call.group + l;
          if (merged)
            finish_partial(call, row, qo_head, state.merged_line(line));
          else
            finish_line(call, row, qo_head, state.softmax(line), state.out + line * ValueDim);
        }
      }
    }
  }

  // Normalises one line and writes it where the caller wants it.
  template <class T, class X, class Y, class V>
  [[gnu::noinline]] void finish_line(const Call<T, X, Y, V>& call, int row, int qo_head,
                                     SoftmaxState softmax, const float* from) noexcept {
    constexpr int width = simd::width_for<ValueDim>;
    Y* const to = call.result(row, qo_head);
    float factor = normaliser(softmax);
    if constexpr (HasSinks<V>) {
      const LogitIndex at{call.plan.row_token[row], (std::max)(call.plan.row_kv_len[row] - 1, 0), 0,
                          qo_head};
      if (const float sink = sink_of<width>(call.variant, at); !is_empty_lse(sink)) {
        const MergedState merged = merge_states(softmax, {sink, 1.0f});
        factor = merged.weight_a * normaliser(merged.state);
        softmax = merged.state;
      }
    }
    for (int i = 0; i < ValueDim; i += width)
      simd::store_narrowed<width>(to + i,
                                  simd::load<width>(from + i) * simd::broadcast<width>(factor));
    if (call.lse != nullptr) *call.denominator(row, qo_head) = log_sum_exp(softmax);
  }

  // The same for a partial result that is complete.
  template <class T, class X, class Y, class V>
  [[gnu::noinline]] void finish_partial(const Call<T, X, Y, V>& call, int row, int qo_head,
                                        LineTotal<ValueDim> result) noexcept {
    if (result.softmax().empty()) result.start({}, zero_row<ValueDim, float>);
    const SoftmaxState softmax = result.close(result.out());
    finish_line(call, row, qo_head, softmax, result.out());
  }

  CpuOptions options_;
  int tile_terms_;
  int byte_terms_;
  int pair_terms_;
  Array<KeyRange> hidden_;  // by row, of the last call whose variant skips keys
  Schedule schedule_;
  TaskQueue tasks_;
  std::vector<State> workers_;
  Partials partials_;
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_ENGINE
