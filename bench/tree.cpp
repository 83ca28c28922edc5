// What the prefix tree and the plan cost on the host: nanoseconds per token and per operation, one
// core. `--benchmark_filter=` picks cases; counters ending in _ns are the figures to read.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <chunkattn/attention_plan.hpp>
#include <chunkattn/cache/admission.hpp>
#include <chunkattn/cache/policy.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace {

using Token = std::uint32_t;
using chunkattn::AttentionPlan;
using chunkattn::CachePolicy;
using chunkattn::PoolAllocator;
using Tree = chunkattn::PrefixTree<Token, 64>;
using PolicyTree = chunkattn::PrefixTree<Token, 64, PoolAllocator, CachePolicy>;
constexpr std::size_t chunk_size = 64;

std::vector<Token> random_tokens(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<Token> tokens(count);
  for (Token& token : tokens) token = static_cast<Token>(engine() >> 40);
  return tokens;
}

/// Adds up what runs between start() and stop(), over many short intervals.
class Stopwatch {
 public:
  void start() { begin_ = std::chrono::steady_clock::now(); }
  double stop() {
    const std::chrono::duration<double> last = std::chrono::steady_clock::now() - begin_;
    total_ += last.count();
    return last.count();
  }
  [[nodiscard]] double seconds() const { return total_; }

 private:
  std::chrono::steady_clock::time_point begin_;
  double total_ = 0;
};

/// A counter in nanoseconds per `count` things, from the time that the benchmark itself reports.
benchmark::Counter per(double count) {
  return benchmark::Counter(count / 1e9, benchmark::Counter::Flags(benchmark::Counter::kIsRate |
                                                                   benchmark::Counter::kInvert));
}
benchmark::Counter total_per(double seconds, double count) {
  return benchmark::Counter(seconds * 1e9 / count);
}

/// As if steps had computed all that is this sequence's to write.
template <class Sequence>
void load(Sequence& sequence) {
  sequence.mark_loaded(sequence.loadable());
}
/// The same but for the last token, which is left to the first step.
template <class Sequence>
void load_prompt(Sequence& sequence) {
  chunkattn::TokenRange range = sequence.loadable();
  --range.length;
  sequence.mark_loaded(range);
}

/// 1,000 prompts that share the first half of the prompt asked for and continue differently: after
/// the same number of tokens, so that the path has one branch, or after 64 different ones, which
/// cuts the path into 64 nodes of one token each.
struct Prompts {
  Prompts(std::size_t length, bool splintered) : prompt(random_tokens(length, 1)) {
    for (std::uint64_t i = 0; i < 1000; ++i) {
      const std::size_t common = length / 2 + (splintered ? i % chunk_size : 0);
      std::vector<Token> other(prompt.begin(),
                               prompt.begin() + static_cast<std::ptrdiff_t>(common));
      const auto tail = random_tokens(chunk_size, 100 + i);
      other.insert(other.end(), tail.begin(), tail.end());
      sequences.push_back(tree.insert(other));
      load(sequences.back());
    }
    sequences.push_back(tree.insert(prompt));
    load(sequences.back());
  }
  Tree tree{{}, {}, {.retains = false}};
  std::vector<Token> prompt;
  std::vector<Tree::Sequence> sequences;
};

void match_of(benchmark::State& state, bool splintered) {
  const auto length = static_cast<std::size_t>(state.range(0));
  const Prompts prompts(length, splintered);
  for (auto _ : state) benchmark::DoNotOptimize(prompts.tree.match_prefix(prompts.prompt));
  state.counters["token_ns"] = per(static_cast<double>(length) * double(state.iterations()));
}
void match(benchmark::State& state) {
  match_of(state, false);
}
void match_splintered(benchmark::State& state) {
  match_of(state, true);
}
BENCHMARK(match)->Arg(64)->Arg(256)->Arg(1024)->Arg(4096)->Arg(16384);
BENCHMARK(match_splintered)->Arg(1024)->Arg(4096);

/// A new prompt of range(0) tokens joins a warm tree and leaves; only joining is timed for
/// token_ns, only leaving for leave_ns.
void insert_new(benchmark::State& state) {
  const auto length = static_cast<std::size_t>(state.range(0));
  Tree tree({}, {}, {.retains = false});
  std::vector<std::vector<Token>> prompts;
  for (std::uint64_t i = 0; i < 64; ++i) prompts.push_back(random_tokens(length, i));
  std::vector<Tree::Sequence> sequences(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) sequences[i] = tree.insert(prompts[i]);
  for (auto& sequence : sequences) sequence.leave();
  Stopwatch joining, leaving;
  for (auto _ : state) {
    joining.start();
    for (std::size_t i = 0; i < prompts.size(); ++i) sequences[i] = tree.insert(prompts[i]);
    const double seconds = joining.stop();
    leaving.start();
    for (auto& sequence : sequences) sequence.leave();
    state.SetIterationTime(seconds + leaving.stop());
  }
  const double joins = 64.0 * double(state.iterations());
  state.counters["token_ns"] = total_per(joining.seconds(), joins * double(length));
  state.counters["insert_ns"] = total_per(joining.seconds(), joins);
  state.counters["leave_ns"] = total_per(leaving.seconds(), joins);
}
BENCHMARK(insert_new)->Arg(64)->Arg(1024)->Arg(4096)->Arg(16384)->UseManualTime();

/// A prompt joins that shares 4,096 tokens with 1,000 others and brings range(0) new ones.
void insert_below_shared(benchmark::State& state) {
  const auto fresh = static_cast<std::size_t>(state.range(0));
  Prompts prompts(4096, true);
  std::vector<Token> prompt = prompts.prompt;
  const auto tail = random_tokens(fresh, 7);
  prompt.insert(prompt.end(), tail.begin(), tail.end());
  Stopwatch joining, leaving;
  for (auto _ : state) {
    joining.start();
    auto sequence = prompts.tree.insert(prompt);
    const double seconds = joining.stop();
    leaving.start();
    sequence.leave();
    state.SetIterationTime(seconds + leaving.stop());
  }
  const double joins = double(state.iterations());
  state.counters["insert_ns"] = total_per(joining.seconds(), joins);
  state.counters["leave_ns"] = total_per(leaving.seconds(), joins);
}
BENCHMARK(insert_below_shared)->Arg(1)->Arg(64)->UseManualTime();

/// What reading the clock costs, for `times` intervals.
double clock_seconds(double times) {
  Stopwatch empty;
  for (int i = 0; i < 10000; ++i) {
    empty.start();
    benchmark::ClobberMemory();
    empty.stop();
  }
  return empty.seconds() / 10000 * times;
}

/// One sequence of range(0) tokens gets known tokens, one by one. What a boundary costs more than
/// another token is distinguished from two runs: all tokens inside chunks, and one token in 64 at a
/// border.
void append(benchmark::State& state) {
  Tree tree({}, {}, {.retains = false});
  const auto prompt = random_tokens(static_cast<std::size_t>(state.range(0)), 3);
  Stopwatch inside, boundary;
  std::uint64_t rounds = 0;
  for (auto _ : state) {
    auto sequence = tree.insert(prompt);
    load(sequence);
    while (sequence.size() % chunk_size != 0) sequence.append(1);
    double seconds = 0;
    for (int block = 0; block < 64; ++block, ++rounds) {
      boundary.start();
      sequence.append(2);
      seconds += boundary.stop();
      inside.start();
      for (std::size_t i = 1; i < chunk_size; ++i) sequence.append(static_cast<Token>(i));
      seconds += inside.stop();
    }
    state.SetIterationTime(seconds);
  }
  const double clock = clock_seconds(double(rounds));
  state.counters["inside_ns"] =
      total_per(inside.seconds() - clock, double(rounds) * (chunk_size - 1));
  state.counters["boundary_ns"] = total_per(boundary.seconds() - clock, double(rounds));
}
BENCHMARK(append)->Arg(64)->Arg(65536)->UseManualTime();

/// Sequences that are in every step together. A step is timed in two parts: the tree's (begin_step,
/// add, finished, commit) and the plan's (build).
struct Steps {
  /// The seconds that the tree takes for one step.
  /// \param drafts   for each sequence
  /// \param outputs  what is committed for each: accepted drafts, then one more
  double run(std::span<const Token> drafts, std::span<const Token> outputs) {
    filling.start();
    auto step = tree.begin_step();
    for (auto& sequence : sequences) {
      const auto added = step.add(sequence, drafts.size() + 1, {.tokens = drafts});
      benchmark::DoNotOptimize(added);
    }
    double seconds = filling.stop();
    building.start();
    benchmark::DoNotOptimize(plan.build(step));
    build_seconds = building.stop();
    finishing.start();
    {
      auto finished = std::move(step).finish();
      for (const auto& row : finished.rows()) finished.commit(row, outputs);
    }
    seconds += finishing.stop();
    ++steps;
    return seconds;
  }
  double run() {
    static constexpr Token output = 9;
    return run({}, {&output, 1});
  }
  void reset() {
    filling = building = finishing = Stopwatch{};
    steps = 0;
  }
  [[nodiscard]] double tree_seconds() const { return filling.seconds() + finishing.seconds(); }

  Tree tree{{}, {}, {.retains = false}};
  std::vector<Tree::Sequence> sequences;
  AttentionPlan plan;
  Stopwatch filling, building, finishing;
  double build_seconds = 0;  ///< of the last step
  std::uint64_t steps = 0;
};

/// 64 sequences of range(0) tokens of their own get one token each in a step: nanoseconds per
/// sequence of the tree's part, inside chunks and where all of them begin a new one, and of the
/// plan's.
void append_in_step(benchmark::State& state) {
  constexpr std::size_t width = 64;
  Steps batch;
  for (std::size_t i = 0; i < width; ++i) {
    batch.sequences.push_back(
        batch.tree.insert(random_tokens(static_cast<std::size_t>(state.range(0)), 3 + i)));
    load_prompt(batch.sequences.back());
  }
  batch.run();
  batch.run();  // the tail's first slot
  batch.reset();
  double inside = 0, boundary = 0, steps_inside = 0, steps_at_boundary = 0;
  for (auto _ : state) {
    const bool at_boundary = batch.sequences[0].size() % chunk_size == 0;  // the output's slot
    const double seconds = batch.run();
    (at_boundary ? boundary : inside) += seconds;
    (at_boundary ? steps_at_boundary : steps_inside) += 1;
    state.SetIterationTime(seconds);
  }
  state.counters["inside_ns"] = total_per(inside, steps_inside * width);
  state.counters["boundary_ns"] = total_per(boundary, steps_at_boundary * width);
  state.counters["build_ns"] =
      total_per(batch.building.seconds(), double(state.iterations()) * width);
}
BENCHMARK(append_in_step)->Arg(64)->Arg(65536)->Iterations(20000)->UseManualTime();

/// A draft of 8 tokens of which 3 are accepted, after a tail of range(0) generated tokens: what
/// the tree and what the plan take for each of 64 sequences in a step.
void speculate(benchmark::State& state) {
  constexpr std::size_t width = 64;
  Steps batch;
  const auto tail = random_tokens(static_cast<std::size_t>(state.range(0)), 5);
  for (std::size_t i = 0; i < width; ++i) {
    batch.sequences.push_back(batch.tree.insert(random_tokens(64, 3 + i)));
    batch.sequences.back().append(tail);
    load_prompt(batch.sequences.back());
  }
  const auto drafts = random_tokens(8, 6);
  for (auto _ : state)
    state.SetIterationTime(batch.run(drafts, std::span<const Token>(drafts).first(4)));
  const double count = double(state.iterations()) * width;
  state.counters["tree_ns"] = total_per(batch.tree_seconds(), count);
  state.counters["build_ns"] = total_per(batch.building.seconds(), count);
}
BENCHMARK(speculate)->Arg(64)->Arg(65536)->Iterations(5000)->UseManualTime();

/// 10,000 sequences that share a prompt of 1,024 tokens, their own lengths staggered over a chunk.
struct Batch : Steps {
  explicit Batch(std::size_t count, std::size_t own = 200) {
    // Every chunk that the run will take has been used before, as in a server that has run a while.
    tree.insert(random_tokens(chunk_size * 16 * count, 1)).leave();
    const auto shared = random_tokens(1024, 11);
    for (std::size_t i = 0; i < count; ++i) {
      auto prompt = shared;
      const auto tail = random_tokens(own + i % chunk_size, 1000 + i);
      prompt.insert(prompt.end(), tail.begin(), tail.end());
      sequences.push_back(tree.insert(prompt));
      load_prompt(sequences.back());
    }
  }
};

/// One decode step of range(0) sequences: what the tree takes (1 in 64 at a boundary), of this what
/// adding the sequences takes, and what the plan takes.
void decode_step(benchmark::State& state) {
  Batch batch(static_cast<std::size_t>(state.range(0)));
  for (int warm = 0; warm < 70; ++warm) batch.run();
  batch.reset();
  const std::uint64_t rebuilds = batch.plan.num_rebuilds();
  std::vector<double> steps;
  for (auto _ : state) {
    steps.push_back(batch.run());
    state.SetIterationTime(steps.back() + batch.build_seconds);
  }
  std::nth_element(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2),
                   steps.end());
  const double count = double(state.iterations());
  state.counters["tree_us"] = batch.tree_seconds() * 1e6 / count;
  state.counters["tree_median_us"] = steps[steps.size() / 2] * 1e6;
  state.counters["add_us"] = batch.filling.seconds() * 1e6 / count;
  state.counters["update_us"] = batch.building.seconds() * 1e6 / count;
  state.counters["rebuilds"] = double(batch.plan.num_rebuilds() - rebuilds);
}
BENCHMARK(decode_step)->Arg(1)->Arg(32)->Arg(256)->Arg(10000)->UseManualTime();

/// All that an engine asks of the host for one decode step, by calls for the whole batch:
/// begin_step, add, build, finished, commit. range(0) sequences share prompts of 4,096 tokens,
/// range(1) different ones; their own lengths are staggered over a chunk. Medians of whole steps,
/// and of each call.
void whole_step(benchmark::State& state) {
  const auto count = static_cast<std::size_t>(state.range(0));
  const auto prefixes = static_cast<std::size_t>(state.range(1));
  Tree tree({}, {}, {.retains = false});
  tree.insert(random_tokens(chunk_size * 16 * count, 1)).leave();  // as in Batch
  std::vector<Tree::Sequence> sequences;
  for (std::size_t i = 0; i < count; ++i) {
    auto prompt = random_tokens(4096, 11 + i * prefixes / count);
    const auto tail = random_tokens(100 + i % chunk_size, 1000 + i);
    prompt.insert(prompt.end(), tail.begin(), tail.end());
    sequences.push_back(tree.insert(prompt));
    load_prompt(sequences.back());
  }
  AttentionPlan plan;
  const std::vector<Token> outputs = random_tokens(count, 3);
  std::vector<double> whole, adding, building, finishing, committing;
  const auto run = [&] {
    using Clock = std::chrono::steady_clock;
    const auto seconds = [](Clock::time_point from, Clock::time_point to) {
      return std::chrono::duration<double>(to - from).count();
    };
    const auto start = Clock::now();
    auto step = tree.begin_step();
    const auto added = step.add(sequences);
    if (!added) state.SkipWithError("a sequence was held");
    const auto filled = Clock::now();
    benchmark::DoNotOptimize(plan.build(step));
    const auto built = Clock::now();
    Clock::time_point finished;
    {
      auto done = std::move(step).finish();
      finished = Clock::now();
      done.commit(outputs);
    }
    const auto end = Clock::now();
    whole.push_back(seconds(start, end));
    adding.push_back(seconds(start, filled));
    building.push_back(seconds(filled, built));
    finishing.push_back(seconds(built, finished));
    committing.push_back(seconds(finished, end));
  };
  for (int warm = 0; warm < 70; ++warm) run();
  for (auto* times : {&whole, &adding, &building, &finishing, &committing}) times->clear();
  const std::uint64_t rebuilds = plan.num_rebuilds();
  for (auto _ : state) {
    run();
    state.SetIterationTime(whole.back());
  }
  const auto median_us = [](std::vector<double>& times) {
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle * 1e6;
  };
  state.counters["median_us"] = median_us(whole);
  state.counters["add_us"] = median_us(adding);
  state.counters["build_us"] = median_us(building);
  state.counters["finish_us"] = median_us(finishing);
  state.counters["commit_us"] = median_us(committing);
  state.counters["rebuilds"] = double(plan.num_rebuilds() - rebuilds);
}
BENCHMARK(whole_step)
    ->Args({256, 1})
    ->Args({10000, 1})
    ->Args({10000, 16})
    ->Iterations(640)
    ->UseManualTime();

/// One sequence joins range(0) others (and one leaves), so that the plan is rebuilt.
void plan_rebuild(benchmark::State& state) {
  Batch batch(static_cast<std::size_t>(state.range(0)));
  batch.run();
  batch.reset();
  auto prompt = random_tokens(1200, 5);
  std::size_t next = 0;
  const std::uint64_t rebuilds = batch.plan.num_rebuilds();
  for (auto _ : state) {
    prompt[1100] = static_cast<Token>(next);
    auto& changed = batch.sequences[next++ % batch.sequences.size()];
    changed = batch.tree.insert(prompt);
    load_prompt(changed);
    batch.run();
    state.SetIterationTime(batch.build_seconds);
  }
  state.counters["update_us"] = batch.building.seconds() * 1e6 / double(state.iterations());
  state.counters["rebuilds_per_step"] =
      double(batch.plan.num_rebuilds() - rebuilds) / double(state.iterations());
}
BENCHMARK(plan_rebuild)->Arg(256)->Arg(10000)->UseManualTime();

/// Forks of one sequence with a private tail of range(0) tokens: below 32 they are copied, above
/// shared. range(1) forks live at a time, then leave.
void fork(benchmark::State& state) {
  const auto tail = static_cast<std::size_t>(state.range(0));
  const auto width = static_cast<std::size_t>(state.range(1));
  Tree tree({}, {}, {.retains = false});
  const auto prompt = random_tokens(1024, 3);
  const auto generated = random_tokens(tail, 4);
  AttentionPlan plan;
  Stopwatch forking, leaving;
  std::vector<Tree::Sequence> children(width);
  for (auto _ : state) {
    auto sequence = tree.insert(prompt);
    load(sequence);
    sequence.append(generated);
    load(sequence);
    forking.start();
    for (auto& child : children) child = sequence.fork();
    const double seconds = forking.stop();
    sequence.append(Token{1});
    auto step = tree.begin_step();  // carries the copies out
    benchmark::DoNotOptimize(step.add(sequence));
    benchmark::DoNotOptimize(plan.build(step));
    (void)std::move(step).finish();
    leaving.start();
    for (auto& child : children) child.leave();
    state.SetIterationTime(seconds + leaving.stop());
  }
  const double forks = double(state.iterations()) * double(width);
  state.counters["fork_ns"] = total_per(forking.seconds(), forks);
  state.counters["leave_ns"] = total_per(leaving.seconds(), forks);
  state.counters["copied_per_fork"] =
      double(tree.stats().copied_tokens) / double(tree.stats().forks);
}
BENCHMARK(fork)->ArgsProduct({{8, 31, 128, 1000}, {16, 1000}})->UseManualTime();

/// Eviction with range(0) chunks cached, in shuffled order of use: 16 prompts of 3 chunks each
/// share a first chunk. One leave crosses the high watermark and evicts down to the low one. The
/// policy is LRU, learns with range(1) = 1, and has shares of 100 tenants with 2.
void evict(benchmark::State& state) {
  const auto cached = static_cast<std::size_t>(state.range(0));
  const std::size_t batch = std::min<std::size_t>(cached / 4, 50000);
  CachePolicy lru;
  lru.high_watermark = cached;
  lru.low_watermark = cached - batch;
  lru.learns = state.range(1) == 1;
  lru.fair = state.range(1) == 2;
  PolicyTree tree(PoolAllocator{.max_chunks = cached + 64}, {}, lru);
  std::mt19937_64 engine(5);
  std::uint64_t next = 0;
  std::vector<Token> prompt(3 * chunk_size);
  const auto make = [&](std::uint64_t id) {
    for (std::size_t i = 0; i < prompt.size(); ++i)
      prompt[i] = static_cast<Token>((i < chunk_size ? id / 16 : id) * 2654435761u + i);
  };
  const auto use = [&](std::uint64_t id) {
    make(id);
    auto sequence = tree.insert(prompt, {.name_space = {.tenant = lru.fair ? id / 16 % 100 : 0}});
    load(sequence);
    sequence.leave();
  };
  const auto fill = [&] {  // in random order among the newest
    while (tree.stats().used_chunks + 34 <= cached) {
      use(next++);
      if (next > 64) use(next - 1 - engine() % std::min<std::uint64_t>(next, cached / 4));
    }
  };
  fill();
  {  // then everything once more, in shuffled order
    std::vector<std::uint64_t> order(next);
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    std::shuffle(order.begin(), order.end(), engine);
    for (const std::uint64_t id : order)
      if (tree.stats().used_chunks + 34 <= cached) use(id);
  }
  double seconds = 0, chunks = 0, worst = 0;
  for (auto _ : state) {
    fill();
    const std::uint64_t before = tree.stats().evicted_chunks;
    make(next++ * 16 + 0x100000000);
    prompt.resize(40 * chunk_size, 77);
    auto sequence = tree.insert(prompt);
    load(sequence);
    prompt.resize(3 * chunk_size);
    Stopwatch watch;
    watch.start();
    sequence.leave();
    const double spent = watch.stop();
    state.SetIterationTime(spent);
    const auto evicted = double(tree.stats().evicted_chunks - before);
    if (evicted < 1) state.SkipWithError("nothing was evicted");
    seconds += spent;
    chunks += evicted;
    worst = std::max(worst, spent / evicted);
  }
  state.counters["chunk_ns"] = total_per(seconds, chunks);
  state.counters["chunks_evicted"] = chunks;
  state.counters["cached"] = double(tree.stats().retained_chunks);
}
BENCHMARK(evict)->ArgsProduct({{1000, 30000, 1000000}, {0, 1, 2}})->Iterations(8)->UseManualTime();

/// The same where a joining prompt of one chunk has to evict one: the whole insert, with
/// range(0) chunks cached. range(1) as above.
void insert_evicting(benchmark::State& state) {
  const auto cached = static_cast<std::size_t>(state.range(0));
  CachePolicy lru;
  lru.learns = state.range(1) == 1;
  lru.fair = state.range(1) == 2;
  PolicyTree tree(PoolAllocator{.max_chunks = cached}, {}, lru);
  std::vector<Token> prompt(chunk_size);
  std::uint64_t next = 0;
  const auto make = [&](std::uint64_t id) {
    for (std::size_t i = 0; i < chunk_size; ++i)
      prompt[i] = static_cast<Token>(id * 2654435761u + i);
  };
  const auto use = [&](std::uint64_t id) {
    make(id);
    auto sequence = tree.insert(prompt, {.name_space = {.tenant = lru.fair ? id % 100 : 0}});
    load(sequence);
  };
  for (; next < cached; ++next) use(next);
  std::vector<std::uint64_t> order(cached);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::mt19937_64 engine(5);
  std::shuffle(order.begin(), order.end(), engine);
  for (const std::uint64_t id : order) use(id);
  for (auto _ : state) use(next++);
  state.counters["evictions"] = double(tree.stats().evicted_chunks) / double(state.iterations());
}
BENCHMARK(insert_evicting)->ArgsProduct({{1000, 1000000}, {0, 1, 2}})->Iterations(200000);

/// One of range(0) siblings below a shared prompt leaves and joins again.
void join_among_siblings(benchmark::State& state) {
  Batch batch(static_cast<std::size_t>(state.range(0)), 64);
  auto prompt = random_tokens(1024, 11);
  prompt.resize(1088, 5);
  std::size_t next = 0;
  for (auto _ : state) {
    prompt[1024] = static_cast<Token>(0x1000000 + next);
    auto& sequence = batch.sequences[next++ % batch.sequences.size()];
    sequence = batch.tree.insert(prompt);
    load(sequence);
  }
}
BENCHMARK(join_among_siblings)->Arg(10)->Arg(10000);

/// range(0) prompts of 2,000 tokens wait, in groups of 100 that share 1,500 tokens, of which every
/// other group has them cached. Timed is one rank(), after range(1) further ones have arrived (and
/// as many have gone), and after joining prompts have evicted range(2) chunks.
void rank(benchmark::State& state) {
  const auto waiting = static_cast<std::size_t>(state.range(0));
  const auto arrivals = static_cast<std::size_t>(state.range(1));
  const auto evictions = static_cast<std::size_t>(state.range(2));
  const std::size_t groups = waiting / 100;
  Tree tree(PoolAllocator{.max_chunks = groups * 12 + 1000});
  const auto make = [&](std::uint64_t id) {
    auto prompt = random_tokens(1500, id % groups);
    const auto own = random_tokens(500, 1000000 + id);
    prompt.insert(prompt.end(), own.begin(), own.end());
    return prompt;
  };
  for (std::uint64_t group = 0; group < groups; group += 2) {
    auto sequence = tree.insert(random_tokens(1500, group));
    load(sequence);
  }
  std::vector<Tree::Sequence> running;
  for (std::uint64_t i = 0; i < 8; ++i) running.push_back(tree.insert(make(i * 2 + 10 * waiting)));
  std::vector<std::vector<Token>> prompts;
  for (std::uint64_t id = 0; id < waiting; ++id) prompts.push_back(make(id));
  chunkattn::AdmissionQueue<Tree> queue;
  for (const auto& prompt : prompts) queue.push({prompt});
  queue.rank(tree);
  std::uint64_t next = waiting, filler = 0;
  double evicted = 0;
  Stopwatch watch;
  for (auto _ : state) {
    for (std::size_t i = 0; i < arrivals; ++i, ++next) {
      queue.cancelled(next - waiting + 1);
      prompts[next % waiting] = make(next);
      queue.push({prompts[next % waiting]});
    }
    const auto before = tree.stats().evicted_chunks;
    while (tree.stats().evicted_chunks < before + evictions) {
      auto sequence = tree.insert(random_tokens(chunk_size * 8, 5000000000 + filler++));
      load(sequence);
    }
    evicted += double(tree.stats().evicted_chunks - before);
    watch.start();
    queue.rank(tree);
    state.SetIterationTime(watch.stop());
  }
  std::size_t cached = 0;
  for (const auto& of : queue.ranks()) cached += of.cached > 0 ? 1 : 0;
  state.counters["with_prefix"] = double(cached);
  state.counters["rank_ms"] = watch.seconds() * 1e3 / double(state.iterations());
  state.counters["evicted_chunks"] = evicted / double(state.iterations());
}
BENCHMARK(rank)
    ->Args({10000, 0, 0})
    ->Args({10000, 100, 0})
    ->Args({10000, 100, 100})
    ->Args({10000, 100, 600})
    ->Iterations(50)
    ->UseManualTime();

}  // namespace

BENCHMARK_MAIN();
