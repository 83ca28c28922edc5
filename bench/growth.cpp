// How operations grow with what a tree keeps: nanoseconds of processor time for each, where so many
// priorities, checkpoints, pins, waiting requests or tenants are there, or ever were.
//
//   growth_bench [--seconds S] [COUNT...]     by default 1, and 1000 10000 100000 1000000
//
// An operation that took longer than S at one count is not measured at those that follow.
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <chunkattn/all.hpp>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/median.hpp"

namespace {

using namespace chunkattn;
using Token = std::uint32_t;
template <class Policy>
using Tree = PrefixTree<Token, 64, PoolAllocator, Policy>;
constexpr std::size_t chunk_size = 64;
constexpr std::size_t lot = 50;  // operations that are timed together
constexpr int rounds = 15;

double now_ns() {
  std::timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

/// The median over rounds of `lot` operations. prepare(round) and operate(i) each do what its name
/// says; only the latter is timed.
template <class Prepare, class Operate>
double operation_ns(const Prepare& prepare, const Operate& operate) {
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    prepare();
    const double start = now_ns();
    for (std::size_t i = 0; i < lot; ++i) operate(i);
    times.push_back((now_ns() - start) / static_cast<double>(lot));
  }
  return bench::median(times);
}

/// A prompt of one chunk of which the first `common` tokens are those of all others of `group`.
std::vector<Token> prompt_of(std::uint64_t id, std::size_t common = 0, std::uint64_t group = 0) {
  std::vector<Token> tokens(chunk_size);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<Token>((i < common ? group : id) * 2654435761u + i);
  return tokens;
}
/// A sequence whose K/V is written.
template <class Tree>
typename Tree::Sequence joined(Tree& tree, const std::vector<Token>& prompt,
                               const InsertOptions& options = {}) {
  auto sequence = tree.insert(prompt, options);
  sequence.mark_loaded(sequence.loadable());
  return sequence;
}

/// One chunk is evicted, and where `is_new`, a prompt of a priority not seen before joins instead.
double priorities(std::size_t count, bool is_new) {
  constexpr std::size_t cached = 1000;
  Tree<RetentionOptions> tree(PoolAllocator{.max_chunks = cached}, {}, {.by_priority = true});
  std::mt19937_64 engine(1);
  std::vector<int> levels(count + lot * rounds);
  std::iota(levels.begin(), levels.end(), 0);
  std::shuffle(levels.begin(), levels.end(), engine);
  std::uint64_t next = 0;
  const auto use = [&](int level) { (void)joined(tree, prompt_of(++next), {.priority = level}); };
  for (std::size_t i = 0; i < count; ++i) use(levels[i]);
  std::size_t seen = count;
  if (is_new)
    return operation_ns([&] { tree.trim(cached - lot); },
                        [&](std::size_t) { use(levels[seen++]); });
  return operation_ns(
      [&] {
        while (tree.stats().used_chunks < cached) use(levels[engine() % count]);
      },
      [&](std::size_t i) { tree.trim(cached - 1 - i); });
}

/// `count` checkpoints are kept, each of a prompt of its own, or of prompts that all begin with the
/// same tokens. One is saved where two prompts part, or before all do.
double saves(std::size_t count, bool below_all) {
  using Caching = Tree<RetentionOptions>;
  Caching tree(PoolAllocator{.max_chunks = 2 * (count + lot)});
  std::optional<Checkpoints<Caching>> checkpoints;
  const auto state = std::make_shared<const int>(0);
  constexpr std::size_t common = lot + 1;
  std::uint64_t next = 0;
  std::vector<Caching::Sequence> kept, running;
  for (std::size_t i = 0; i < count; ++i)
    kept.push_back(joined(tree, prompt_of(++next, below_all ? common : 0)));
  return operation_ns(
      [&] {
        checkpoints.emplace(tree, Checkpoints<Caching>::Options{count + lot, chunk_size});
        for (const auto& sequence : kept) checkpoints->save(sequence, chunk_size, state);
        running.clear();
        for (std::size_t i = 0; i < lot; ++i) {
          const std::uint64_t group = ++next;
          for (int copy = 0; copy < 2; ++copy)
            running.push_back(joined(tree, prompt_of(++next, common, group)));
        }
      },
      [&](std::size_t i) {
        if (below_all)
          checkpoints->save(kept[i], 1 + i, state);
        else
          checkpoints->save(running[2 * i], common, state);
      });
}

/// A sequence leaves whose tokens another one has published, while so many checkpoints are kept.
double merges(std::size_t count) {
  using Caching = Tree<RetentionOptions>;
  Caching tree(PoolAllocator{.max_chunks = 4 * (count + lot)});
  Checkpoints<Caching> checkpoints(tree, {.max_count = count + lot});
  const auto state = std::make_shared<const int>(0);
  std::uint64_t next = 0;
  std::vector<Caching::Sequence> running, leaving;
  for (std::size_t i = 0; i < count; ++i) {
    running.push_back(joined(tree, prompt_of(++next)));
    checkpoints.save(running.back(), chunk_size, state);
  }
  return operation_ns(
      [&] {
        leaving.clear();
        for (std::size_t i = 0; i < lot; ++i) {
          const auto prompt = prompt_of(++next);
          for (int copy = 0; copy < 2; ++copy) {
            leaving.push_back(joined(tree, prompt));
            leaving.back().append(prompt_of(1));
            leaving.back().mark_loaded(leaving.back().loadable());
          }
          checkpoints.save(leaving.back(), 2 * chunk_size, state);
          leaving[2 * i].leave();
        }
      },
      [&](std::size_t i) { leaving[2 * i + 1].leave(); });
}

/// A prompt is pinned, or where `evicts`, a pinned one is evicted, since nothing else is left.
double pins(std::size_t count, bool evicts) {
  using Caching = Tree<RetentionOptions>;
  const std::size_t most = count + lot;
  Caching tree(PoolAllocator{.max_chunks = most}, {}, {.max_pinned = most});
  std::vector<Caching::Pin> held, fresh;
  std::vector<Caching::Sequence> running;
  std::vector<std::vector<Token>> prompts;
  std::uint64_t next = 0;
  const auto use = [&](std::size_t times) {
    for (prompts.clear(); prompts.size() < times;) {
      prompts.push_back(prompt_of(++next));
      (void)joined(tree, prompts.back());
    }
  };
  use(count);
  for (const auto& prompt : prompts) held.push_back(tree.pin(prompt));
  if (!evicts)
    return operation_ns(
        [&] {
          fresh.clear();
          use(lot);
        },
        [&](std::size_t i) { fresh.push_back(tree.pin(prompts[i])); });
  std::size_t oldest = 0;
  return operation_ns(
      [&] {
        running.clear();
        use(lot);
        for (const auto& prompt : prompts) held[oldest++ % count] = tree.pin(prompt);
        for (std::size_t i = 0; i < lot; ++i) running.push_back(joined(tree, prompt_of(++next)));
      },
      [&](std::size_t) { running.push_back(joined(tree, prompt_of(++next))); });
}

/// One of `count` waiting requests is admitted, as `while (waiting.admit(tree))` does.
double admissions(std::size_t count) {
  using Caching = Tree<RetentionOptions>;
  Caching tree(PoolAllocator{.max_chunks = count + 2 * lot * rounds});
  AdmissionQueue<Caching> waiting;
  std::vector<std::vector<Token>> prompts;
  for (std::size_t i = 0; i < count + lot * rounds; ++i)
    prompts.push_back(prompt_of(i, 32, i % 100));
  for (const auto& prompt : prompts) waiting.push({prompt});
  std::vector<Caching::Sequence> running;
  return operation_ns([&] { waiting.rank(tree); },
                      [&](std::size_t) {
                        if (auto next = waiting.admit(tree))
                          running.push_back(std::move(next->second));
                      });
}

/// Bytes that a tree has taken, of which so many tenants have had a share; 1,000 chunks are cached.
double tenants(std::size_t count) {
  const auto used = [] {
    const auto info = ::mallinfo2();
    return static_cast<double>(info.uordblks + info.hblkhd);
  };
  const double before = used();
  Tree<CachePolicy> tree(PoolAllocator{.max_chunks = 1000}, {}, {{.fair = true}});
  for (std::size_t i = 0; i < count; ++i)
    (void)joined(tree, prompt_of(i), {.name_space = {.tenant = i}});
  return used() - before;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::size_t> counts;
  double seconds = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--seconds" && i + 1 < argc)
      seconds = std::stod(argv[++i]);
    else
      counts.push_back(std::stoul(argv[i]));
  }
  if (counts.empty()) counts = {1000, 10000, 100000, 1000000};
  const std::vector<std::pair<const char*, std::function<double(std::size_t)>>> rows = {
      {"`by_priority`: evict a chunk | priorities ever used",
       [](auto n) { return priorities(n, false); }},
      {"`by_priority`: `insert()`, `leave()` | priorities ever used, this one not",
       [](auto n) { return priorities(n, true); }},
      {"`Checkpoints::save()` where prompts part | checkpoints",
       [](auto n) { return saves(n, false); }},
      {"the same, before all part | checkpoints, of prompts that continue after it",
       [](auto n) { return saves(n, true); }},
      {"`leave()`, merging into an equal path | checkpoints", merges},
      {"`pin()` | pins", [](auto n) { return pins(n, false); }},
      {"`insert()` that evicts a pinned chunk | pins", [](auto n) { return pins(n, true); }},
      {"`AdmissionQueue::admit()` | requests that wait", admissions},
      {"`fair`: bytes of the tree | tenants ever seen", tenants},
  };
  fmt::print("| ns of | by number of |");
  for (const std::size_t count : counts) fmt::print(" {} |", count);
  fmt::print("\n| --- | --- |");
  for (std::size_t i = 0; i < counts.size(); ++i) fmt::print(" ---: |");
  for (const auto& [name, measure] : rows) {
    fmt::print("\n| {} |", name);
    bool is_quick = true;
    for (const std::size_t count : counts) {
      const double start = now_ns();
      fmt::print("{}", is_quick ? fmt::format(" {:.0f} |", measure(count)) : " – |");
      is_quick = is_quick && now_ns() - start <= 1e9 * seconds;
    }
  }
  fmt::print("\n");
  return 0;
}
