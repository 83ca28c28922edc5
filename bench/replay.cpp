// Replays the Mooncake conversation trace on the prefix tree: hit rate under several budgets and
// policies against the bound of an infinite cache, and what the tree takes per operation.
//
// Equal block ids of the trace stand for equal blocks of 512 tokens. Here a block becomes 40 to 56
// tokens, length and content given by its id, so that prompts part inside chunks; outputs are
// scaled alike. `--check` verifies the tree's invariants after every 64th request. The trace is
// looked for under CHUNKATTN_DATA (default ../shared); without it the program says so and stops.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <chunkattn/prefix_tree.hpp>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Token = std::uint32_t;
using Clock = std::chrono::steady_clock;

struct Request {
  std::int64_t arrival_ms = 0;
  int output = 0;
  std::vector<Token> prompt;
};

std::int64_t number_after(std::string_view line, std::string_view key) {
  const std::size_t at = line.find(key);
  std::int64_t value = 0;
  if (at != std::string_view::npos)
    std::from_chars(line.data() + at + key.size(), line.data() + line.size(), value);
  return value;
}

std::vector<Request> read_trace(const std::string& path) {
  std::vector<Request> requests;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    Request request;
    request.arrival_ms = number_after(line, "\"timestamp\": ");
    request.output = static_cast<int>(number_after(line, "\"output_length\": ")) * 48 / 512 + 1;
    const char* at = line.data() + line.find('[') + 1;
    for (const char* const end = line.data() + line.size(); at < end && *at != ']';) {
      std::uint32_t id = 0;
      at = std::from_chars(at, end, id).ptr;
      while (at < end && (*at == ',' || *at == ' ')) ++at;
      const std::uint32_t length = 40 + (id * 2654435761u >> 16) % 17;
      for (std::uint32_t i = 0; i < length; ++i) request.prompt.push_back(id * 64 + i);
    }
    // Half of a last block is the request's own, as the trace's lengths are not whole blocks.
    if (request.prompt.size() > 24)
      for (std::size_t i = request.prompt.size() - 12; i < request.prompt.size(); ++i)
        request.prompt[i] = 0x80000000u + static_cast<Token>(requests.size());
    requests.push_back(std::move(request));
  }
  return requests;
}

template <class Retention>
void replay(const char* policy, const std::vector<Request>& requests, std::size_t budget,
            Retention retention, double bound, bool check) {
  using Tree = chunkattn::PrefixTree<Token, 64, chunkattn::PoolAllocator, Retention>;
  Tree tree(chunkattn::PoolAllocator{.max_chunks = budget}, {}, retention);
  struct Running {
    std::int64_t end_ms;
    std::size_t order;
    bool operator<(const Running& other) const {
      return end_ms != other.end_ms ? end_ms > other.end_ms : order > other.order;
    }
  };
  std::priority_queue<Running> running;
  std::vector<typename Tree::Sequence> sequences(requests.size());
  std::vector<Token> answer;
  std::size_t refused = 0, operations = 0, broken = 0;
  Clock::duration spent{}, insert_time{}, leave_time{};
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Request& request = requests[i];
    auto begin = Clock::now();
    while (!running.empty() && running.top().end_ms <= request.arrival_ms) {
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
    running.push({request.arrival_ms + 200 + 30 * request.output, i});
    if (check && i % 64 == 0) {
      try {
        tree.check_invariants();
      } catch (const chunkattn::Error& error) {
        if (broken++ == 0) fmt::print("  {}\n", error.what());
      }
    }
  }
  spent += insert_time;
  const auto stats = tree.stats();
  const double hits =
      double(stats.cached_tokens + stats.pending_tokens) / double(stats.prompt_tokens);
  const auto ns = [](Clock::duration d) {
    return std::chrono::duration<double, std::nano>(d).count();
  };
  const std::string chunks = budget > (std::size_t{1} << 30) ? "unlimited" : std::to_string(budget);
  fmt::print(
      "| {:<11} | {:>9} | {:>7.2f} % | {:>7.1f} % | {:>9} | {:>7} | {:>10.2f} | {:>8.0f} | "
      "{:>7.0f} | {:>6} |\n",
      policy, chunks, 100 * hits, bound > 0 ? 100 * hits / bound : 100, stats.evicted_chunks,
      refused, ns(insert_time) / double(stats.prompt_tokens),
      ns(leave_time) / double(std::max<std::uint64_t>(1, stats.leaves)),
      ns(spent) / double(operations), check ? std::to_string(broken) : "-");
}

}  // namespace

int main(int argc, char** argv) {
  const char* data = std::getenv("CHUNKATTN_DATA");
  const std::string path = std::string(data != nullptr ? data : "../shared") +
                           "/traces/mooncake_conversation_trace.jsonl";
  const auto requests = read_trace(path);
  if (requests.empty()) {
    fmt::print("{}: no trace there; set CHUNKATTN_DATA. Nothing was replayed.\n", path);
    return 0;
  }
  const bool check = argc > 1 && std::string_view(argv[1]) == "--check";
  constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
  // The bound: every prompt stays for ever.
  double bound = 0;
  std::size_t chunks = 0, tokens = 0;
  {
    chunkattn::PrefixTree<Token, 64, chunkattn::PoolAllocator, chunkattn::Lru> tree;
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
      "| policy      |    chunks |      hits | of bound  | evicted   | refused | insert/tok | "
      "leave ns | op ns   | broken |\n");
  fmt::print(
      "| ----------- | --------: | --------: | --------: | --------: | ------: | ---------: | "
      "-------: | ------: | -----: |\n");
  replay("NoRetention", requests, unlimited, chunkattn::NoRetention{}, bound, check);
  replay("Lru", requests, unlimited, chunkattn::Lru{}, bound, check);
  for (const int percent : {50, 25, 10, 5, 2}) {
    const std::size_t budget = chunks * static_cast<std::size_t>(percent) / 100;
    replay("Lru", requests, budget, chunkattn::Lru{}, bound, check);
    replay("Priority", requests, budget, chunkattn::Priority{}, bound, check);
    chunkattn::Lru marks;
    marks.high_watermark = budget * 95 / 100;
    marks.low_watermark = budget * 85 / 100;
    replay("Lru 95/85 %", requests, budget, marks, bound, check);
  }
}
