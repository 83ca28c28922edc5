// The engine over a prefix tree of one chunk size.
#pragma once

#include <algorithm>
#include <chrono>
#include <chunkattn/cache/admission.hpp>
#include <chunkattn/debug/tree.hpp>
#include <chunkattn/events/cache_events.hpp>
#include <cmath>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "../model/forward.hpp"
#include "../ranks/agreed_tokens.hpp"
#include "../ranks/agreement.hpp"
#include "attention_cuda.hpp"
#include "cache_reasons.hpp"
#include "cached_chunks.hpp"
#include "engine.hpp"
#include "engine_tiers.hpp"
#include "engine_windows.hpp"
#include "paged_view.hpp"
#include "prompt_scores.hpp"
#include "sampling.hpp"
#include "step_budget.hpp"
#include "tree_engines.hpp"
#include "work.hpp"

namespace serve {

template <int ChunkSize>
class TreeEngine final : public Engine {
 public:
  using Tree = chunkattn::PrefixTree<std::int32_t, ChunkSize>;
  using Sequence = typename Tree::Sequence;
  using Step = typename Tree::Step;

  TreeEngine(const Model& model, Products& products, const EngineOptions& options)
      : model_(model),
        options_(options),
        tree_(chunkattn::PoolAllocator{.max_chunks = options.max_chunks},
              {.sharing = options.mode == Mode::tree ? options.sharing
                                                     : chunkattn::TreeOptions::Sharing::chunk},
              retention_of(options.mode)),
        windows_(make_windows(tree_, model.config, options)),
        attention_(make_attention(options.kv, tree_, model.config, products.executor(),
                                  attention_options(options),
                                  windows_ ? &windows_->layers() : nullptr)),
        scores_(tree_),
        forward_(model, products),
        executor_(products.executor()),
        agreed_(products.ranks()),
        budget_(options.step_tokens, options.step_seconds) {
    if (options.on_gpu && (model.config.window > 0 || model.config.sm_scale))
      throw std::invalid_argument(
          "on_gpu = true: expected a model without windows or a scale of "
          "its own, which are not built for GPUs here");
    // A step has a row for each that decodes, of which there are no more than chunks.
    if (options.on_gpu)
      on_gpu_ = std::make_unique<AttentionOnGpu<Tree>>(tree_, model.config,
                                                       options.max_chunks + options.step_tokens);
    if (windows_) windows_->set_cache(attention_->window_cache());
    tiers_ =
        make_tiers(tree_, attention_->cache(), options.tiers, tenants_, tier_sink_, companions());
    if (options.explained_tokens > 0)
      reasons_.emplace(tree_, options.explained_tokens, windows_.get(), tiers_.get());
  }
  TreeEngine(const TreeEngine&) = delete;
  TreeEngine& operator=(const TreeEngine&) = delete;
  ~TreeEngine() override {
    if (!tiers_) return;
    loads_.clear();
    for (Group* group : {&decoding_, &prefilling_, &split_off_})
      *group = Group();  // what they computed is cached now
    tiers_->store_all();
    tiers_.reset();
  }

  void submit(Request request) override {
    check(request);
    // The last token that is generated needs no position: it is not computed.
    request.max_length = std::min(request.max_length, positions() + 1);
    const std::vector<int> prompt =
        request.prompt_logprobs ? request.prompt : std::move(request.prompt);
    const auto job = std::make_shared<LiveRequest>(std::move(request), prompt.size());
    if (job->request.sampling.repetition_penalty != 1) job->penalised = each_once(prompt);
    if (job->request.min_tokens > 0) {
      job->ends = options_.stop;
      job->ends.insert(job->ends.end(), job->request.stop_tokens.begin(),
                       job->request.stop_tokens.end());
    }
    jobs_.emplace(job->request.id, job);
    if (tiers_) tenants_.add(job->request.tenant, job->request.salt);
    ++num_waiting_;
    // Without sharing, every choice computes the prompt by itself.
    const int parts = options_.mode == Mode::paged ? job->request.choices : 1;
    for (int choice = 0; choice < parts; ++choice) {
      Work work;
      work.job = job;
      work.choice = choice;
      work.splits = parts < job->request.choices;
      work.tokens = prompt;
      if (options_.order == Order::cache)
        work.queue_id = queue_.push({work.tokens, insert_options(work)});  // moved, they stay there
      waiting_.push_back(std::move(work));
    }
  }

  void cancel(RequestId id) override {
    const auto found = jobs_.find(id);
    if (found == jobs_.end()) return;
    end_all(found->second, Finish::cancelled);
    sweep();
  }

  void stop(RequestId id, int choice) override {
    const auto found = jobs_.find(id);
    if (found == jobs_.end()) return;
    const std::shared_ptr<LiveRequest> job = found->second;
    if (choice < 0 || choice >= job->request.choices || job->has_ended(choice)) return;
    end(*job, {id, choice, -1, Finish::stop, 0});
    sweep();
  }

  bool step(double now) override {
    at_risk_.clear();
    expire(now);
    admit();
    // Blocks of K/V that are not stored yet: a few beside a step, more when there is none.
    bool is_storing = false;
    if (tiers_) {
      is_storing = options_.tiers.published && tiers_->is_busy();  // to be published
      is_storing |= tiers_->advance(live() == 0 ? 64 : 4) > 0;
      stats_.tiers = tiers_->counts();
    }
    if (live() == 0) {
      // Blocks that are being offloaded are waited for.
      if (is_storing) std::this_thread::sleep_for(std::chrono::microseconds(200));
      return is_storing;
    }
    for (bool is_alone = false; !try_step();) {
      if (live() > 1) {
        preempt_one();
      } else {
        if (std::exchange(is_alone, true)) throw std::logic_error("a sequence alone has no room");
        // Its path leads through chunks that others have cut: it goes a way of its own.
        preempt(prefilling_.empty() ? decoding_ : prefilling_, 0);
        admit(/*by_itself=*/true);
      }
    }
    return true;
  }

  [[nodiscard]] std::vector<RequestId> failed() const override { return at_risk_; }
  std::vector<Event> take_events() override { return std::exchange(events_, {}); }
  [[nodiscard]] std::size_t waiting() const override { return num_waiting_; }
  [[nodiscard]] const EngineStats& stats() const override { return stats_; }
  [[nodiscard]] std::size_t bytes_per_chunk() const override {
    return on_gpu_ ? on_gpu_->bytes_per_chunk() : attention_->bytes_per_chunk();
  }
  [[nodiscard]] std::size_t bytes_per_window_chunk() const override {
    return attention_->bytes_per_window_chunk();
  }

  [[nodiscard]] TreeSnapshot snapshot() const override {
    TreeSnapshot shot;
    chunkattn::for_each_node(tree_, 16, [&](const auto& node) {
      shot.nodes.push_back({node.id, node.parent, static_cast<std::size_t>(node.length),
                            static_cast<std::size_t>(node.num_sequences), node.name_space.tenant,
                            node.first_tokens});
    });
    const chunkattn::TreeStats tree = tree_.stats();
    shot.chunk_size = ChunkSize;
    shot.chunks_cached = tree.retained_chunks;
    shot.chunks_used = tree.used_chunks - tree.retained_chunks;
    shot.chunks_free = options_.max_chunks - tree.used_chunks;
    shot.evicted_tokens = tree.evicted_tokens;
    shot.has_tiers = tiers_ != nullptr;
    if (windows_) {
      const auto windows = windows_->layers().stats();
      shot.windows = {.keys = windows_->layers().options().window,
                      .chunks_used = windows.used_chunks - windows.cached_chunks,
                      .chunks_cached = windows.cached_chunks,
                      .chunks_free = windows_->layers().options().max_chunks - windows.used_chunks,
                      .evicted_chunks = windows.evicted_chunks};
    }
    return shot;
  }
  void set_cache_sink(CacheSink sink) override {
    cache_events_.reset();
    if (!sink) return;
    const auto stream = chunkattn::CacheEvents<Tree>::new_stream();
    if (windows_)
      cache_events_.emplace(tree_, std::move(sink), stream, windows_->layers());
    else
      cache_events_.emplace(tree_, std::move(sink), stream);
  }
  void set_gone(std::function<bool(RequestId)> is_gone) override { is_gone_ = std::move(is_gone); }
  void set_tier_sink(TierSink sink) override { tier_sink_ = std::move(sink); }
  [[nodiscard]] std::vector<CachedChunk> cached_chunks() const override {
    return cached_chunks_of(tree_);
  }

 private:
  using Group = serve::Group<Sequence>;

  /// Of a step, each with all of its logits.
  static constexpr std::size_t most_scored_rows = 128;

  static chunkattn::RetentionOptions retention_of(Mode mode) {
    chunkattn::RetentionOptions retention;
    if (mode == Mode::paged) retention.high_watermark = 0;  // no prompt would find what is kept
    return retention;
  }
  static chunkattn::CpuOptions attention_options(const EngineOptions& options) {
    chunkattn::CpuOptions attention{.reduce = options.reduce};
    // Several sequences name the same pages: one head at a time leaves them in the caches.
    if (options.mode == Mode::paged_prefix) attention.tuning.max_task_heads = 1;
    return attention;
  }
  static std::unique_ptr<EngineWindows<Tree>> make_windows(Tree& tree, const Config& config,
                                                           const EngineOptions& options) {
    if (!has_window_chunks(config, options)) return nullptr;
    return std::make_unique<EngineWindows<Tree>>(tree, config.window, max_window_chunks(options));
  }
  static std::size_t chunks_alone(std::size_t tokens) {
    return (tokens + ChunkSize - 1) / ChunkSize;
  }
  [[nodiscard]] std::size_t positions() const {
    return static_cast<std::size_t>(model_.config.max_positions);
  }
  [[nodiscard]] std::size_t live() const { return decoding_.size() + prefilling_.size(); }

  void check(const Request& request) const {
    const auto fail = [&](const char* field, auto value, const std::string& expected) {
      throw std::invalid_argument("request " + std::to_string(request.id) + ": " + field + " = " +
                                  std::to_string(value) + ": expected " + expected);
    };
    const std::size_t size = request.prompt.size();
    if (jobs_.contains(request.id)) fail("id", request.id, "one that no other request has");
    if (size < 1 || size > positions())
      fail("tokens of the prompt", size,
           "1 to the model's positions, " + std::to_string(positions()));
    if (request.max_length < size)
      fail("max_length", request.max_length,
           "at least the prompt's tokens, " + std::to_string(size));
    if (chunks_alone(std::min(request.max_length, positions() + 1)) + 1 > options_.max_chunks)
      fail("max_length", request.max_length,
           "no more than " + std::to_string((options_.max_chunks - 1) * ChunkSize) +
               ", what max_chunks has room for");
    for (const int token : request.prompt)
      if (token < 0 || token >= model_.config.vocab_size)
        fail("a token of the prompt", token, "a token of the model");
    if (request.choices < 1 || request.choices > 128) fail("choices", request.choices, "1 to 128");
    if (std::isnan(request.start_by)) fail("start_by", request.start_by, "a time");
    if (std::isnan(request.deadline)) fail("deadline", request.deadline, "a time");
    check_sampling(request.sampling);
    for (const int token : request.stop_tokens)
      if (token < 0 || token >= model_.config.vocab_size)
        fail("a token of stop_tokens", token, "a token of the model");
    for (const LogitBias& one : request.logit_bias) {
      if (one.token < 0 || one.token >= model_.config.vocab_size)
        fail("a token of logit_bias", one.token, "a token of the model");
      if (!(one.bias >= -100 && one.bias <= 100)) fail("a logit_bias", one.bias, "-100 to 100");
    }
    if (request.logprobs < -1 || request.logprobs > most_logprobs)
      fail("logprobs", request.logprobs, "-1, which is none, to 20");
    if (request.prompt_logprobs && request.logprobs < 0)
      fail("logprobs", request.logprobs, "0 to 20 beside prompt_logprobs");
    if (request.scored_from < 1 || request.scored_from > size)
      fail("scored_from", request.scored_from, "1 to the prompt's tokens, " + std::to_string(size));
    for (const int token : request.labels)
      if (token < 0 || token >= model_.config.vocab_size)
        fail("a token of labels", token, "a token of the model");
  }

  // --- ends
  // ---------------------------------------------------------------------------------------

  void end(LiveRequest& job, const Event& last) {
    events_.push_back(last);
    job.ended[static_cast<std::size_t>(last.choice)] = 1;
    if (--job.open > 0) return;
    if (!job.joined) --num_waiting_;
    jobs_.erase(job.request.id);
  }
  void end_all(std::shared_ptr<LiveRequest> job, Finish finish) {
    for (int choice = 0; choice < job->request.choices; ++choice)
      if (!job->has_ended(choice)) end(*job, {job->request.id, choice, -1, finish, 0});
  }
  void expire(double now) {
    const std::size_t before = jobs_.size();
    for (auto at = jobs_.begin(); at != jobs_.end();) {
      const std::shared_ptr<LiveRequest> job = (at++)->second;  // which end_all() takes out
      if (job->request.deadline < now)
        end_all(job, Finish::deadline);
      else if (!job->joined && job->request.start_by < now)
        end_all(job, Finish::late);
    }
    if (jobs_.size() < before) sweep();
  }
  /// Removes what is no longer wanted.
  void sweep() {
    std::erase_if(waiting_, [&](const Work& work) {
      if (!work.is_wanted() && work.queue_id != 0) queue_.cancelled(work.queue_id);
      return !work.is_wanted();
    });
    regroup();
  }

  // --- who is live ------------------------------------------------------------------------------

  /// Work joins in the order of the options while it fits, and a chunk for each to
  /// grow.
  void admit(bool by_itself = false) {
    while (!waiting_.empty() && live() < options_.max_sequences) {
      if (waiting_.front().has_precedence() && has_precedence()) return;
      const auto next = next_waiting();
      if (agreed_.ranks().size() == 1) at_risk_.assign(1, next->job->request.id);
      auto sequence = try_join(*next, by_itself);
      if (!sequence) at_risk_.clear();
      if (!sequence) return;
      Work work = std::move(*next);
      waiting_.erase(next);
      if (work.queue_id != 0) queue_.admitted(std::exchange(work.queue_id, 0));
      if (!std::exchange(work.job->joined, true)) --num_waiting_;
      work.tokens = {};
      if (work.swapped) stats_.restored_tokens += sequence->num_written() - sequence->num_cached();
      work.swapped.reset();
      if (tiers_ && !by_itself)
        if (auto load = tiers_->load(*sequence)) loads_[sequence->id()] = std::move(load);
      prefilling_.push(std::move(*sequence), std::move(work));
      at_risk_.clear();
      if (by_itself) return;
    }
  }
  /// Those in front that were live before come before all others.
  std::deque<Work>::iterator next_waiting() {
    if (waiting_.front().queue_id == 0) return waiting_.begin();
    queue_.rank(tree_);
    const std::uint64_t queue_id = queue_.next()->id;
    return std::find_if(waiting_.begin(), waiting_.end(),
                        [&](const Work& work) { return work.queue_id == queue_id; });
  }
  static chunkattn::InsertOptions insert_options(const Work& work) {
    chunkattn::InsertOptions options{.name_space = {.tenant = work.job->request.tenant},
                                     .preempted = work.job->joined};
    if (work.job->scores_prompt()) options.max_reuse = work.job->next_scored();
    return options;
  }
  /// Whether a live one has: others are preempted for it, so a second waits until it has got its
  /// token.
  [[nodiscard]] bool has_precedence() const {
    return std::any_of(prefilling_.works.begin(), prefilling_.works.end(),
                       [](const Work& work) { return work.has_precedence(); });
  }
  std::optional<Sequence> try_join(Work& work, bool by_itself) {
    chunkattn::InsertOptions options = insert_options(work);
    const auto fits = [&] {
      return tree_.chunks_needed(work.tokens, options) + live() + 1 <= tree_.chunks_available() &&
             (!windows_ || live() == 0 ||
              windows_->has_room(work.tokens, options, prefilling_, live()));
    };
    // Cached chunks that others have cut may cost more than they save; where no sequence is live,
    // it does not wait for that.
    by_itself = by_itself || options_.mode == Mode::paged || (live() == 0 && !fits());
    if (by_itself) options.name_space.adapter = ++num_unshared_;  // as with weights of its own
    if (!fits()) return std::nullopt;
    if (!work.swapped) {
      if (!reasons_ || work.job->joined) return tree_.try_insert(work.tokens, options);
      CacheReport report = reasons_->explain(work.tokens, options);
      auto sequence = tree_.try_insert(work.tokens, options);
      if (!sequence) return sequence;
      reasons_->count(report, stats_);
      if (work.job->request.explains)
        work.job->report = std::make_shared<const CacheReport>(std::move(report));
      return sequence;
    }
    work.swapped->options.name_space = options.name_space;
    return std::visit(
        [&](auto* cache) { return chunkattn::resume(tree_, *cache, *work.swapped, companions()); },
        attention_->cache());
  }
  /// Before a step: what has been scored, or loaded, is not computed for prompts that joined; and
  /// what was loaded without scores is.
  void recall_scores() {
    for (std::size_t i = 0; i < prefilling_.size(); ++i) {
      Sequence& sequence = prefilling_.sequences[i];
      LiveRequest& job = *prefilling_.works[i].job;
      if (!job.scores_prompt() || is_loading(sequence)) continue;
      const std::size_t known = scores_.recall(job, sequence);
      stats_.scored_tokens += known;
      stats_.recalled_tokens += known;
      if (known == 0 && job.next_scored() >= sequence.num_scheduled()) continue;
      chunkattn::InsertOptions options = sequence.options();
      options.max_reuse = job.next_scored();
      if (auto again = tree_.try_insert(sequence.tokens(), options))
        sequence = std::move(*again);
      else if (job.next_scored() < sequence.num_scheduled())
        preempt(prefilling_, i--);
    }
  }
  /// Whether another one is about to score tokens of this prompt.
  [[nodiscard]] bool is_being_scored(const Sequence& sequence, const LiveRequest& job) const {
    return scores_.has_all_of(job.request) && sequence.num_pending() > 0 &&
           sequence.num_written() + sequence.num_pending() > job.next_scored() + 1;
  }

  /// The one that joined last of those without precedence is preempted. There is one: no more than
  /// one has precedence.
  void preempt_one() {
    for (Group* group : {&prefilling_, &decoding_})
      for (std::size_t i = group->size(); i-- > 0;) {
        if (group->works[i].has_precedence()) continue;
        const int in_a_row = ++group->works[i].preempted;
        stats_.fruitless_preemptions = std::max(stats_.fruitless_preemptions, in_a_row);
        ++stats_.preemptions;
        preempt(*group, i);
        return;
      }
    throw std::logic_error("no sequence can be preempted");
  }
  /// A sequence leaves, and waits in front of the others.
  void preempt(Group& group, std::size_t i) {
    auto [sequence, work] = group.take(i);
    work.tokens = sequence.tokens();
    work.reached = std::max(work.reached, sequence.num_written());
    work.decodes = false;
    if (options_.preempt == Preempt::swap && attention_->bytes_per_chunk() > 0)
      swap_out(sequence, work);
    waiting_.push_front(std::move(work));
  }
  void swap_out(Sequence& sequence, Work& work) {
    const std::size_t written = sequence.num_written();
    const std::size_t tokens = written - std::min(sequence.num_shared(), written);
    std::visit(
        [&](auto* cache) {
          std::size_t used = chunkattn::kv_bytes(*cache, tokens) +
                             (windows_ ? windows_->swapped_bytes(written) : 0);
          for (const Work& other : waiting_) used += other.swapped_bytes();
          if (used > options_.swap_bytes) {
            ++stats_.swaps_refused;
            return;
          }
          work.swapped = chunkattn::swap_out(sequence, *cache, companions());
          ++stats_.swaps;
          stats_.swapped_tokens += tokens;
        },
        attention_->cache());
  }

  /// What travels with K/V that is swapped, or goes to tiers.
  [[nodiscard]] chunkattn::KvCompanions<Sequence> companions() {
    chunkattn::KvCompanions<Sequence> all{scores_.companion()};
    if (windows_) all.push_back(windows_->companion());
    return all;
  }

  /// Those that are done leave; those whose prompts are computed decode from now on.
  void regroup() {
    Group decoding, prefilling;
    for (Group* group : {&decoding_, &prefilling_, &split_off_})
      for (std::size_t i = 0; i < group->size(); ++i) {
        Work& work = group->works[i];
        if (work.is_wanted())
          (work.decodes ? decoding : prefilling)
              .push(std::move(group->sequences[i]), std::move(work));
      }
    decoding_ = std::move(decoding);
    prefilling_ = std::move(prefilling);
    split_off_ = {};
  }

  // --- a step
  // -------------------------------------------------------------------------------------

  /// False, with nothing changed, if there is no memory for a token of each that decodes, or
  /// nothing can run.
  [[nodiscard]] bool try_step() {
    const bool waits = poll_loads();
    resume_windows();  // of those that joined: who joins again may need the same
    recall_scores();
    std::optional<Step> step = make_step();
    if (!step) {
      if (!waits || !decoding_.empty()) return false;
      // All live ones wait for loads.
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      return true;
    }
    count_step(*step);
    const auto start = std::chrono::steady_clock::now();
    const auto rows = static_cast<std::size_t>(step->num_rows());
    const bool is_prefill = rows > 2 * decoding_.size();
    try {
      compute(std::move(*step));
    } catch (const Abandoned&) {
      return true;
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (is_prefill) budget_.computed(rows, seconds);
    if (tiers_ && is_prefill) tiers_->computed(rows, seconds);
    return true;
  }
  void resume_windows() {
    if (windows_)
      windows_->resume(prefilling_, [this](const Sequence& one) { return is_loading(one); });
  }
  [[nodiscard]] bool is_loading(const Sequence& sequence) const {
    return !loads_.empty() && loads_.contains(sequence.id());
  }
  /// Puts in place what has come from tiers. Whether anybody still waits for more.
  bool poll_loads() {
    if (loads_.empty()) return false;
    std::map<chunkattn::SequenceId, std::unique_ptr<typename EngineTiers<Tree>::Load>> left;
    for (Sequence& sequence : prefilling_.sequences) {
      const auto found = loads_.find(sequence.id());
      if (found != loads_.end() && found->second->poll(sequence))
        left.insert(loads_.extract(found));
    }
    loads_ = std::move(left);  // the others are over, or their sequences have left
    return !loads_.empty();
  }

  /// A step with as many tokens as there is memory for; nothing where there is none for one of
  /// each that decodes, or nothing can run.
  std::optional<Step> make_step() {
    resume_windows();
    for (std::size_t tokens = budget_.tokens();; tokens /= 2) {
      Step step = tree_.begin_step();
      if (!fill(step, tokens)) return std::nullopt;
      if (!windows_ || windows_->has_room(step)) return step;
      if (tokens == 0) return std::nullopt;
    }
  }
  /// A token of all that decode; then parts of prompts, up to `tokens_left`.
  bool fill(Step& step, std::size_t tokens_left) {
    in_step_.clear();
    logit_rows_.clear();
    scored_rows_.clear();
    paged_view_.clear();
    if (!decoding_.empty() && !step.add(std::span<Sequence>(decoding_.sequences))) return false;
    for (std::size_t i = 0; i < decoding_.size(); ++i) {
      logit_rows_.push_back(static_cast<int>(i));
      add_rows(decoding_, i, static_cast<int>(decoding_.sequences[i].size()) - 1, 1);
    }
    for (std::size_t i = 0; i < prefilling_.size() && tokens_left > 0; ++i) {
      if (is_loading(prefilling_.sequences[i])) continue;
      if (windows_ && !windows_->is_ready(prefilling_.sequences[i])) continue;
      const LiveRequest& job = *prefilling_.works[i].job;
      if (job.scores_prompt() && is_being_scored(prefilling_.sequences[i], job)) continue;
      const std::size_t most =
          job.scores_prompt() ? most_rows(prefilling_.sequences[i], job) : tokens_left;
      if (most == 0) continue;
      const auto added = step.add(prefilling_.sequences[i], std::min(most, tokens_left));
      if (!added) continue;  // it waits for what another one is to compute, or for a chunk
      if (added.row().has_output) logit_rows_.push_back(added.row().output_row());
      if (job.scores_prompt())
        for (int row = 0; row < added.row().num_rows; ++row)
          if (const auto position = static_cast<std::size_t>(added.row().position + row);
              position >= job.next_scored() && position + 1 < job.prompt_size)
            scored_rows_.push_back({&prefilling_.sequences[i], prefilling_.works[i].job.get(),
                                    added.row().first_row + row, position});
      add_rows(prefilling_, i, added.row().position, added.row().num_rows);
      tokens_left -= static_cast<std::size_t>(added.row().num_rows);
    }
    for (const ScoredRow& scored : scored_rows_) logit_rows_.push_back(scored.row);
    return step.num_rows() > 0;
  }
  /// Rows of a prompt that is scored: up to the first that is, and as many of those as still fit.
  [[nodiscard]] std::size_t most_rows(const Sequence& sequence, const LiveRequest& job) const {
    const std::size_t at = sequence.num_scheduled();
    return std::max(job.next_scored(), at) - at + most_scored_rows - scored_rows_.size();
  }
  void add_rows(Group& group, std::size_t i, int position, int rows) {
    in_step_.push_back({&group.sequences[i], &group.works[i], static_cast<std::size_t>(position),
                        static_cast<std::size_t>(rows)});
    if (options_.mode != Mode::tree) paged_view_.add(group.sequences[i], position, rows);
  }

  void count_step(const Step& step) {
    ++stats_.steps;
    for (const StepEntry& entry : in_step_)
      stats_.recomputed += entry.work->count_rows(entry.position, entry.rows);
    stats_.rows += static_cast<std::size_t>(step.num_rows());
    stats_.peak_sequences = std::max(stats_.peak_sequences, live());
    const chunkattn::TreeStats tree = tree_.stats();
    const std::size_t used = tree.used_chunks - tree.retained_chunks;
    stats_.peak_chunks = std::max(stats_.peak_chunks, used);
    std::size_t tokens = 0, chunks = 0;
    for (const Group* group : {&decoding_, &prefilling_})
      for (const Sequence& sequence : group->sequences) {
        tokens += sequence.size();
        chunks += chunks_alone(sequence.size() + 1);  // its output has a slot already
      }
    if (tokens <= stats_.unshared_tokens) return;
    stats_.unshared_chunks = chunks;
    stats_.unshared_tokens = tokens;
    stats_.chunks = used;
    stats_.window_chunks = windows_ ? windows_->layers().stats().used_chunks : 0;
    stats_.distinct_tokens = 0;
    chunkattn::for_each_node(tree_, 0, [&](const auto& node) {
      if (node.num_sequences > 0) stats_.distinct_tokens += static_cast<std::size_t>(node.length);
    });
  }

  void compute(Step step) {
    put_at_risk(decoding_.size() < in_step_.size() ? decoding_.size() : 0);
    const auto plan = plan_.build(step);
    const std::vector<int> tokens = plan.tokens(), positions = plan.positions();
    chunkattn::LiveView view = plan;
    if (options_.mode != Mode::tree) view = paged_view_.over(plan);
    const chunkattn::LiveView window_view = windows_ ? windows_->layers().view(plan) : view;
    check_step(agreed_.ranks(), tokens, positions, logit_rows_, tree_.stats());
    const auto logits_by = [&](Attention& attention) {
      return forward_.run(tokens, positions, logit_rows_,
                          [&](int layer, std::span<const float> q, std::span<const float> k,
                              std::span<const float> v, std::span<float> out) {
                            if (is_abandoned()) throw Abandoned();
                            attention.run(layer, model_.config.is_local(layer) ? window_view : view,
                                          q, k, v, out);
                          });
    };
    std::span<const float> logits = logits_by(*attention_);
    if (on_gpu_) {
      const std::vector<float> expected(logits.begin(), logits.end());
      logits = logits_by(*on_gpu_);
      compare(logits, expected);
    }
    stats_.plan_rebuilds = plan_.num_rebuilds();
    if (windows_) {
      const auto windows = windows_->layers().stats();
      stats_.peak_window_chunks = windows.peak_used_chunks;
      stats_.window_tokens = windows.recomputed_tokens;
    }
    put_at_risk(0);
    auto finished = std::move(step).finish();
    score_prompts(logits);
    sample(std::move(finished), logits);
    at_risk_.clear();
  }
  /// Those of the step from this one on: prompts after those that decode. A step that throws while
  /// it is computed has not happened; which of its tokens were too many are, if there are any,
  /// those of prompts. Among several ranks none can be left out.
  void put_at_risk(std::size_t first) {
    at_risk_.clear();
    for (std::size_t i = first; i < in_step_.size() && agreed_.ranks().size() == 1; ++i)
      at_risk_.push_back(in_step_[i].work->job->request.id);
  }

  /// Whether all requests of this step are about to be cancelled.
  [[nodiscard]] bool is_abandoned() const {
    return is_gone_ && std::all_of(in_step_.begin(), in_step_.end(), [&](const StepEntry& entry) {
             return is_gone_(entry.work->job->request.id);
           });
  }

  void compare(std::span<const float> logits, std::span<const float> expected) {
    stats_.compared_logits += logits.size();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double difference = std::abs(static_cast<double>(logits[i]) - expected[i]);
      stats_.largest_difference =
          std::max(stats_.largest_difference,
                   std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference);
    }
  }

  /// What the model says of the prompts' tokens. Their logits follow those that are sampled.
  void score_prompts(std::span<const float> all_logits) {
    const auto vocabulary = static_cast<std::size_t>(model_.config.vocab_size);
    const auto logits = all_logits.last(scored_rows_.size() * vocabulary);
    std::vector<std::vector<TokenLogprob>> scores(scored_rows_.size());
    executor_.parallel_for(static_cast<int>(scores.size()), [&](int i) {
      const auto at = static_cast<std::size_t>(i);
      const Request& request = scored_rows_[at].job->request;
      const int next = request.prompt[scored_rows_[at].position + 1];
      scores[at] =
          logprobs_of(logits.subspan(at * vocabulary, vocabulary), next, scores_.wanted(request));
    });
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const auto& [sequence, job, row, position] = scored_rows_[i];
      auto said = scores_.keep(*sequence, position, job->request, std::move(scores[i]));
      if (job->next_scored() != position) continue;  // another sequence has computed its prompt
      job->prompt_logprobs.push_back(std::move(said));
      ++stats_.scored_tokens;
    }
  }

  void sample(typename Tree::Finished finished, std::span<const float> all_logits) {
    const auto vocabulary = static_cast<std::size_t>(model_.config.vocab_size);
    bool changed = false;
    outputs_.clear();
    agreed_.begin();
    for (const chunkattn::ScheduledSequence& row : finished.rows()) {
      const auto logits = all_logits.subspan(outputs_.size() * vocabulary, vocabulary);
      const auto position = static_cast<std::size_t>(row.position + row.num_rows);
      const auto [sequence, work, from, rows] = in_step_[static_cast<std::size_t>(row.index)];
      if (position == work->job->prompt_size) finish_prompt(*work);
      const int choices = std::exchange(work->splits, false) ? work->job->request.choices : 0;
      outputs_.push_back(choose(*work, logits, position));
      for (int choice = work->choice + 1; choice < choices; ++choice)
        if (!work->job->has_ended(choice)) split_off(*sequence, *work, choice, logits);
      changed = changed || !work->is_wanted() || !work->decodes || !split_off_.empty();
      work->decodes = true;
    }
    agreed_.end();
    finished.commit(outputs_);  // those that leave get theirs too, which is never computed
    if (changed) regroup();
  }

  void finish_prompt(Work& work) {
    work.cached = work.job->prompt_size - work.computed;
    stats_.prompt_tokens += work.job->prompt_size;
    stats_.cached_tokens += work.cached;
    if (work.splits)
      while (work.job->has_ended(work.choice)) ++work.choice;  // one has not, or it had left
  }

  /// The next token of a choice, and what that means for it.
  int choose(Work& work, std::span<const float> logits, std::size_t position) {
    LiveRequest& job = *work.job;
    work.preempted = 0;
    const Request& request = job.request;
    Event event{request.id, work.choice, -1, Finish::none, std::exchange(work.cached, 0)};
    const bool is_early = position - job.prompt_size < request.min_tokens;
    const int token = agreed_.next([&] {  // where there are logits
      const std::span<const int> ends = job.ends;
      const auto adjusted = sampler_.adjusted(
          logits, request, {work.counts, job.penalised, is_early ? ends : std::span<const int>()});
      const int chosen = sampler_.sample(adjusted, request.sampling, work.choice, position);
      if (request.logprobs >= 0) event.logprobs = logprobs_of(logits, chosen, request.logprobs);
      if (!request.labels.empty() && !job.prompt_reported)
        event.labels = logprobs_of(logits, request.labels);
      return chosen;
    });
    event.token = token;
    if (request.sampling.has_penalties()) ++work.counts[token];
    const bool is_beyond = position >= request.max_length;  // nothing was to be generated
    const auto is_among = [token](const std::vector<int>& tokens) {
      return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
    };
    const bool is_end = !request.ignore_eos && is_among(options_.stop);
    if (!is_beyond && !is_early && (is_end || is_among(request.stop_tokens))) {
      event.finish = Finish::stop;
      if (!is_end) event.stop_token = token;
    } else if (position + 1 >= request.max_length) {
      event.finish = Finish::length;
    }
    if (event.finish == Finish::stop || is_beyond) {
      event.token = -1;
      if (is_beyond || !request.prompt_logprobs) event.logprobs.clear();
    }
    if (!std::exchange(job.prompt_reported, true))
      event.prompt_logprobs = std::move(job.prompt_logprobs);
    event.report = std::exchange(job.report, nullptr);
    stats_.generated_tokens += event.token >= 0 ? 1 : 0;
    if (event.finish == Finish::none)
      events_.push_back(std::move(event));
    else
      end(job, event);
    return token;
  }

  /// Another choice continues a prompt that is computed, in a fork where there is memory for one.
  void split_off(Sequence& prompt, const Work& first, int choice, std::span<const float> logits) {
    Work work;
    work.job = first.job;
    work.choice = choice;
    work.cached = first.job->prompt_size - first.computed;
    work.reached = prompt.size();
    const int token = choose(work, logits, prompt.size());
    if (!work.is_wanted()) return;
    if (live() + split_off_.size() < options_.max_sequences) {
      auto fork = prompt.try_fork();
      if (fork && fork->try_append(std::span(&token, 1)) &&
          (!windows_ || windows_->resume_fork(*fork))) {
        work.decodes = true;
        split_off_.push(std::move(*fork), std::move(work));
        return;
      }
    }
    work.tokens = prompt.tokens();
    work.tokens.push_back(token);
    waiting_.push_front(std::move(work));
  }

  const Model& model_;
  EngineOptions options_;
  Tree tree_;
  std::unique_ptr<EngineWindows<Tree>> windows_;  // null: all K/V is in the tree's chunks
  std::unique_ptr<HostAttention> attention_;
  std::unique_ptr<Attention> on_gpu_;
  PromptScores<Tree> scores_;
  Forward forward_;
  chunkattn::ThreadPool& executor_;
  Sampler sampler_;
  AgreedTokens agreed_;
  StepBudget budget_;
  chunkattn::AttentionPlan plan_;
  PagedView paged_view_;

  std::map<RequestId, std::shared_ptr<LiveRequest>> jobs_;
  std::deque<Work> waiting_;
  chunkattn::AdmissionQueue<Tree> queue_;  // of these, with Order::cache, those that never ran
  std::size_t num_waiting_ = 0;            // requests
  std::uint64_t num_unshared_ = 0;         // sequences that joined in a name space of their own
  Group decoding_, prefilling_, split_off_;

  std::optional<chunkattn::CacheEvents<Tree>> cache_events_;
  TierSink tier_sink_;
  TenantNames tenants_;
  std::unique_ptr<EngineTiers<Tree>> tiers_;
  std::optional<CacheReasons<Tree>> reasons_;  // if any are wanted
  std::map<chunkattn::SequenceId, std::unique_ptr<typename EngineTiers<Tree>::Load>> loads_;

  struct StepEntry {
    Sequence* sequence;
    Work* work;
    std::size_t position, rows;
  };
  std::vector<StepEntry> in_step_;  // by ScheduledSequence::index
  std::vector<RequestId> at_risk_;
  struct Abandoned {};  // thrown between the layers of such a step
  std::function<bool(RequestId)> is_gone_;
  struct ScoredRow {
    const Sequence* sequence;
    LiveRequest* job;
    int row;
    std::size_t position;
  };
  std::vector<ScoredRow> scored_rows_;  // of prompts, whose logits are wanted, too
  std::vector<int> logit_rows_, outputs_;
  std::vector<Event> events_;
  EngineStats stats_;
};

template <int ChunkSize>
std::unique_ptr<Engine> make_tree_engine(const Model& model, Products& products,
                                         const EngineOptions& options) {
  return std::make_unique<TreeEngine<ChunkSize>>(model, products, options);
}

}  // namespace serve
