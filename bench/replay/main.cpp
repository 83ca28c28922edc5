// Replays a trace of requests on the prefix tree: hit rate under several budgets and policies
// against the bound of an infinite cache, and what the tree takes per operation.
//
//     replay_bench [--check | schedule | retention] [FILE]
//
// FILE is a trace as trace_file.hpp says; by default Mooncake's of conversations under
// CHUNKATTN_DATA (../shared), without which the program says so and leaves out what needs one.
// `--check` verifies the tree's invariants after every 64th request.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <chunkattn/debug/tree.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

#include "retention.hpp"
#include "schedule.hpp"
#include "trace.hpp"

namespace {

using replay::Request;
using replay::Token;
using Clock = std::chrono::steady_clock;

void replay_under(const char* policy, const std::vector<Request>& requests, std::size_t budget,
                  const chunkattn::RetentionOptions& retention, double bound, bool check) {
  using Tree = chunkattn::PrefixTree<Token, 64>;
  Tree tree(chunkattn::PoolAllocator{.max_chunks = budget}, {}, retention);
  struct Running {
    double end;
    std::size_t order;
    bool operator<(const Running& other) const {
      return end != other.end ? end > other.end : order > other.order;
    }
  };
  std::priority_queue<Running> running;
  std::vector<Tree::Sequence> sequences(requests.size());
  std::vector<Token> answer;
  std::size_t refused = 0, operations = 0, broken = 0;
  Clock::duration spent{}, insert_time{}, leave_time{};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = requests[i];
    auto begin = Clock::now();
    while (!running.empty() && running.top().end <= request.arrival) {
      sequences[running.top().order].leave();
      running.pop();
      ++operations;
    }
    auto end = Clock::now();
    leave_time += end - begin;
    spent += end - begin;
    begin = end;
    chunkattn::InsertOptions options;
    options.priority = request.prompt.size() > 1000 ? 0 : 1;
    options.compute_last = false;  // whole prompts are hits: nothing is sampled here
    auto sequence = tree.try_insert(request.prompt, options);
    end = Clock::now();
    insert_time += end - begin;
    begin = end;
    ++operations;
    if (!sequence) {
      ++refused;
      continue;
    }
    sequence->mark_loaded(sequence->loadable());  // as if steps had computed it
    answer.assign(static_cast<std::size_t>(request.output), 0x40000000u + static_cast<Token>(i));
    if (sequence->try_append(answer)) sequence->mark_loaded(sequence->loadable());
    operations += 3;
    spent += Clock::now() - begin;
    sequences[i] = std::move(*sequence);
    running.push({request.arrival + 0.2 + 0.03 * request.output, i});
    if (check && i % 64 == 0) {
      try {
        check_invariants(tree);
      } catch (const chunkattn::Error& error) {
        if (broken++ == 0) fmt::print("  {}\n", error.what());
      }
    }
  }
  spent += insert_time;
  const auto stats = tree.stats();
  const double tokens =
      double(std::max<std::uint64_t>(1, stats.prompt_tokens));  // of those that fit
  const double hits = double(stats.cached_tokens + stats.pending_tokens) / tokens;
  const auto ns = [](Clock::duration d) {
    return std::chrono::duration<double, std::nano>(d).count();
  };
  const std::string chunks = budget > (std::size_t{1} << 30) ? "unlimited" : std::to_string(budget);
  fmt::print(
      "| {:<12} | {:>9} | {:>7.2f} % | {:>7.1f} % | {:>9} | {:>7} | {:>10.2f} | {:>8.0f} | "
      "{:>7.0f} | {:>6} |\n",
      policy, chunks, 100 * hits, bound > 0 ? 100 * hits / bound : 100, stats.evicted_chunks,
      refused, ns(insert_time) / tokens,
      ns(leave_time) / double(std::max<std::uint64_t>(1, stats.leaves)),
      ns(spent) / double(operations), check ? std::to_string(broken) : "-");
}

void run_budgets(const std::vector<Request>& requests, bool check) {
  constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
  // The bound: every prompt stays for ever.
  double bound = 0;
  std::size_t chunks = 0, tokens = 0;
  {
    chunkattn::PrefixTree<Token, 64> tree({}, {}, {.high_watermark = chunkattn::max_pool_chunks});
    for (const Request& request : requests) {
      auto sequence = tree.insert(request.prompt, {.compute_last = false});
      sequence.mark_loaded(sequence.loadable());
    }
    const auto stats = tree.stats();
    bound = double(stats.cached_tokens) / double(stats.prompt_tokens);
    chunks = stats.used_chunks;
    tokens = stats.prompt_tokens;
  }
  fmt::print(
      "{} requests, {} prompt tokens; an infinite cache takes {} chunks and hits {:.2f} %\n\n",
      requests.size(), tokens, chunks, 100 * bound);
  fmt::print(
      "| policy       |    chunks |      hits | of bound  | evicted   | refused | insert/tok | "
      "leave ns | op ns   | broken |\n");
  fmt::print(
      "| ------------ | --------: | --------: | --------: | --------: | ------: | ---------: | "
      "-------: | ------: | -----: |\n");
  replay_under("no retention", requests, unlimited, {.retains = false}, bound, check);
  replay_under("LRU", requests, unlimited, {.high_watermark = chunkattn::max_pool_chunks}, bound,
               check);
  for (const int percent : {50, 25, 10, 5, 2}) {
    const std::size_t budget = chunks * static_cast<std::size_t>(percent) / 100;
    replay_under("LRU", requests, budget, {}, bound, check);
    replay_under("by priority", requests, budget, {.by_priority = true}, bound, check);
    chunkattn::RetentionOptions marks;
    marks.high_watermark = budget * 95 / 100;
    marks.low_watermark = budget * 85 / 100;
    replay_under("LRU 95/85 %", requests, budget, marks, bound, check);
  }
}

/// Mooncake's where no file is given. Nothing, and it says so, where that is not there.
std::vector<replay::TracedRequest> trace_of(const std::optional<std::string>& file) {
  if (file) return replay::read_trace(*file);
  const char* const data = std::getenv("CHUNKATTN_DATA");
  const std::string mooncake = std::string(data != nullptr ? data : "../shared") +
                               "/traces/mooncake_conversation_trace.jsonl";
  if (std::filesystem::exists(mooncake)) return replay::read_trace(mooncake);
  fmt::print("{}: no trace there; set CHUNKATTN_DATA, or name a file. None was replayed.\n",
             mooncake);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  std::string verb;
  std::optional<std::string> file;
  std::size_t at = 0;
  if (at < words.size() &&
      (words[at] == "schedule" || words[at] == "retention" || words[at] == "--check"))
    verb = words[at++];
  if (at < words.size()) file = words[at++];
  if (at < words.size() || (file && file->starts_with('-'))) {
    fmt::print(stderr, "replay_bench: {}: expected [--check | schedule | retention] [FILE]\n",
               words.back());
    return 2;
  }
  try {
    const auto trace = trace_of(file);
    const char* const name = file ? "file" : "mooncake";
    if (verb == "schedule") {
      replay::run_schedules(name, trace);
    } else if (verb == "retention") {
      replay::run_retention(name, trace);
    } else if (!trace.empty()) {
      run_budgets(replay::trace_requests(trace), verb == "--check");
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "replay_bench: {}\n", error.what());
    return 1;
  }
}
