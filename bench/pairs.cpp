// Two ways to compute attention held against each other: their steps in turn, in one process, at
// least 41 rounds each, the median of the ratios with its 95 % interval. Neighbours on a shared
// machine change the times of both by tens of percents, and hardly touch the ratio.
//
//   pairs_bench [--filter=TEXT]... [--rounds=N] [--threads=N] [--cold=MB] [--list]
//
// The ratio is that of the times per flop, first over second: below 1 the first is faster. "Of
// peak" is the first one's part of what the same threads' fp32 multiply-adds reach between the
// rounds; with a matrix unit it may be above 100 %.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "bench/machine.hpp"
#include "bench/pair_step.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "examples/support/huge_buffer.hpp"
#include "examples/support/machine_limits.hpp"

namespace {

using namespace bench;

struct Side {
  MakeStep* make;
  StepCase which;
};

struct Pair {
  std::string name;
  Side first;
  Side second;
};

constexpr std::pair<Element, const char*> elements[] = {{Element::fp32, "fp32"},
                                                        {Element::bf16, "bf16"},
                                                        {Element::fp16, "fp16"},
                                                        {Element::int8, "int8"}};

std::string text(int a, char separator, int b) {
  return std::to_string(a) + separator + std::to_string(b);
}

StepCase decode(int batch, int shared, int own, int qo_heads, int kv_heads, int head_dim = 128) {
  return {one_prefix(batch, shared, own), qo_heads, kv_heads, head_dim};
}

StepCase prefill(int batch, int shared, int tokens, int qo_heads, int kv_heads,
                 int head_dim = 128) {
  StepCase which = decode(batch, shared, tokens, qo_heads, kv_heads, head_dim);
  which.batch.query_tokens = tokens;
  which.cold = false;
  return which;
}

/// Reads as many bytes as attention has to, from memory that no cache holds.
class ReadStep : public Step {
 public:
  ReadStep(const StepCase& which, chunkattn::ThreadPool& pool, std::size_t cold_bytes)
      : pool_(pool), buffer_(std::max(cold_bytes, std::size_t{64} << 20)) {
    const auto step = make_native_step(which, pool, 0);
    flops = step->flops;
    bytes = step->bytes;
    std::memset(buffer_.as<char>(), 1, buffer_.bytes());
  }
  void run() override {
    const int threads = pool_.concurrency();
    auto left = static_cast<std::size_t>(bytes);
    while (left > 0) {
      if (at_ == buffer_.bytes()) at_ = 0;
      const std::size_t size = std::min(left, buffer_.bytes() - at_);
      const std::size_t share = size / static_cast<std::size_t>(threads);
      pool_.parallel_for(threads, [&](int t) {
        const std::size_t begin = at_ + static_cast<std::size_t>(t) * share;
        sum_ += examples::sum_bytes(buffer_.as<char>() + begin, share);
      });
      at_ += size;
      left -= size;
    }
  }

 private:
  chunkattn::ThreadPool& pool_;
  examples::HugeBuffer buffer_;
  std::size_t at_ = 0;
  std::atomic<std::uint64_t> sum_{0};
};

std::unique_ptr<Step> make_read_step(const StepCase& which, chunkattn::ThreadPool& pool,
                                     std::size_t cold_bytes) {
  return std::make_unique<ReadStep>(which, pool, cold_bytes);
}

/// The same case for some element types.
void add_types(std::vector<Pair>& pairs, const std::string& name, Side first, Side second,
               std::size_t num_types) {
  for (std::size_t i = 0; i < num_types; ++i) {
    first.which.element = second.which.element = elements[i].first;
    pairs.push_back({name + "/" + elements[i].second, first, second});
  }
}

/// What dot products compute, and in which accuracy.
struct DotType {
  const char* name;
  Element element;
  chunkattn::CpuOptions::Accuracy accuracy = chunkattn::CpuOptions::Accuracy::two_terms;
  bool bf16_queries = false;

  [[nodiscard]] StepCase of(StepCase which) const {
    which.element = element;
    which.options.accuracy = accuracy;
    which.bf16_queries = bf16_queries;
    return which;
  }
};
constexpr DotType dot_types[] = {
    {"int8", Element::int8},
    {"bf16_one_term", Element::bf16, chunkattn::CpuOptions::Accuracy::one_term},
    {"bf16_queries", Element::bf16, chunkattn::CpuOptions::Accuracy::two_terms, true}};

// Compiled without -march, against -march=native.
void add_builds(std::vector<Pair>& pairs) {
  const auto add = [&](const std::string& name, const StepCase& which) {
    add_types(pairs, "plain:native/" + name, {make_plain_step, which}, {make_native_step, which},
              4);
  };
  for (const int kv_heads : {32, 8}) {
    const std::string heads = text(32, ':', kv_heads);
    add("decode/heads:" + heads + "/shared:4096/own:64", decode(32, 4096, 64, 32, kv_heads));
    add("decode/heads:" + heads + "/shared:0/own:1024", decode(32, 0, 1024, 32, kv_heads));
  }
  add("prefill/heads:32:8/4x512", prefill(4, 0, 512, 32, 8));
  for (const DotType& type : dot_types)
    for (const int kv_heads : {32, 8}) {
      if (type.element == Element::int8) continue;  // above
      const StepCase which = type.of(decode(32, 4096, 64, 32, kv_heads));
      pairs.push_back({"plain:native/decode/heads:" + text(32, ':', kv_heads) +
                           "/shared:4096/own:64/" + type.name,
                       {make_plain_step, which},
                       {make_native_step, which}});
    }
}

// Heads that do not divide by the threads, against 32/8 with as many query-head rows per KV head.
void add_heads(std::vector<Pair>& pairs) {
  constexpr int shapes[][2] = {{9, 3}, {24, 4}, {16, 1}};
  for (const auto& [qo_heads, kv_heads] : shapes) {
    for (const int head_dim : {64, 128}) {
      const int lines = 32 * qo_heads / kv_heads;
      add_types(pairs, "heads:" + text(qo_heads, ':', kv_heads) + "/d:" + std::to_string(head_dim),
                {make_native_step, decode(32, 4096, 64, qo_heads, kv_heads, head_dim)},
                {make_native_step, decode(lines / 4, 4096, 64, 32, 8, head_dim)}, 2);
    }
  }
}

// Other head_dims, against 128.
void add_head_dims(std::vector<Pair>& pairs) {
  for (const int head_dim : {64, 80, 96, 256}) {
    const std::string name = "d:" + text(head_dim, ':', 128);
    add_types(pairs, name + "/decode", {make_native_step, decode(32, 4096, 64, 32, 8, head_dim)},
              {make_native_step, decode(32, 4096, 64, 32, 8)}, 2);
    add_types(pairs, name + "/prefill", {make_native_step, prefill(4, 0, 512, 32, 8, head_dim)},
              {make_native_step, prefill(4, 0, 512, 32, 8)}, 2);
  }
}

// The same for what dot products compute.
void add_dot_head_dims(std::vector<Pair>& pairs) {
  for (const int head_dim : {64, 80, 96, 256})
    for (const DotType& type : dot_types)
      pairs.push_back({"d:" + text(head_dim, ':', 128) + "/decode/" + type.name,
                       {make_native_step, type.of(decode(32, 4096, 64, 32, 8, head_dim))},
                       {make_native_step, type.of(decode(32, 4096, 64, 32, 8))}});
}

// int8 against all other K/V: it is to be the fastest everywhere.
void add_int8(std::vector<Pair>& pairs) {
  const auto add = [&](const std::string& name, const StepCase& which) {
    const Side int8{make_native_step, dot_types[0].of(which)};
    for (const auto& [element, type] : elements)
      if (element != Element::int8) {
        Side other{make_native_step, which};
        other.which.element = element;
        pairs.push_back({"int8:" + std::string(type) + "/" + name, int8, other});
      }
    for (const DotType& type : dot_types)
      if (type.element != Element::int8)
        pairs.push_back({"int8:" + std::string(type.name) + "/" + name,
                         int8,
                         {make_native_step, type.of(which)}});
  };
  for (const int kv_heads : {32, 8}) {
    const std::string heads = "heads:" + text(32, ':', kv_heads);
    for (const int shared : {1024, 2048, 4096})
      add(heads + "/shared:" + std::to_string(shared) + "/own:64",
          decode(32, shared, 64, 32, kv_heads));
    add(heads + "/shared:0/own:1024", decode(32, 0, 1024, 32, kv_heads));
    for (const int batch : {1, 2, 4, 8, 16})
      add(heads + "/b:" + std::to_string(batch), decode(batch, 4096, 64, 32, kv_heads));
  }
  add("prefill/4x512", prefill(4, 0, 512, 32, 8));
}

// Prefill of long prompts, and of new tokens over a prefix with and without sharing it.
void add_prefill(std::vector<Pair>& pairs) {
  add_types(pairs, "prefill:4x512/1x8192", {make_native_step, prefill(1, 0, 8192, 32, 8)},
            {make_native_step, prefill(4, 0, 512, 32, 8)}, 2);
  add_types(pairs, "prefill:4x512/4x2048", {make_native_step, prefill(4, 0, 2048, 32, 8)},
            {make_native_step, prefill(4, 0, 512, 32, 8)}, 2);
  for (const DotType& type : dot_types)
    for (const int batch : {1, 4})
      pairs.push_back({"prefill_dots:4x512/" + text(batch, 'x', 8192 / batch) + "/" + type.name,
                       {make_native_step, type.of(prefill(batch, 0, 8192 / batch, 32, 8))},
                       {make_native_step, type.of(prefill(4, 0, 512, 32, 8))}});
  const StepCase shared = prefill(32, 4096, 64, 32, 8);
  StepCase unshared = shared;
  unshared.share = false;
  add_types(pairs, "shared:unshared/prefill/32x64 after 4096", {make_native_step, shared},
            {make_native_step, unshared}, 2);
}

// What is chosen for so many query-head rows, against products whatever their number, and against
// streams: new tokens of one sequence are rows that have all that is cached in common.
void add_paths(std::vector<Pair>& pairs) {
  for (const int lines : {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13,
                          14, 16, 17, 20, 24, 26, 28, 32, 33, 40, 48, 56, 64}) {
    StepCase chosen = decode(1, 4096, lines, 32, 32);
    chosen.batch.query_tokens = lines;
    StepCase products = chosen, streams = chosen;
    products.options.tuning.min_product_lines = 1;
    streams.options.tuning.min_product_lines = std::numeric_limits<int>::max();
    const std::string name = "/lines:" + std::to_string(lines);
    add_types(pairs, "chosen:products" + name, {make_native_step, chosen},
              {make_native_step, products}, 4);
    add_types(pairs, "chosen:streams" + name, {make_native_step, chosen},
              {make_native_step, streams}, 4);
    for (const DotType& type : dot_types) {
      if (type.element == Element::int8) continue;  // above
      const Side first{make_native_step, type.of(chosen)};
      pairs.push_back({"chosen:products" + name + "/" + type.name,
                       first,
                       {make_native_step, type.of(products)}});
      pairs.push_back(
          {"chosen:streams" + name + "/" + type.name, first, {make_native_step, type.of(streams)}});
    }
  }
}

// Attention against plain reads of the bytes that it has to read.
void add_reads(std::vector<Pair>& pairs) {
  for (const int kv_heads : {32, 8}) {
    const std::string heads = "heads:" + text(32, ':', kv_heads);
    for (const int shared : {1024, 2048, 4096}) {
      const StepCase which = decode(32, shared, 64, 32, kv_heads);
      add_types(pairs, "ours:reads/" + heads + "/shared:" + std::to_string(shared) + "/own:64",
                {make_native_step, which}, {make_read_step, which}, 4);
    }
    const StepCase which = decode(32, 0, 1024, 32, kv_heads);
    add_types(pairs, "ours:reads/" + heads + "/shared:0/own:1024", {make_native_step, which},
              {make_read_step, which}, 4);
  }
}

// A window over a long context, against a context of its length.
void add_windows(std::vector<Pair>& pairs) {
  const auto add = [&](const std::string& name, StepCase windowed, const StepCase& plain) {
    windowed.window = 1024;
    add_types(pairs, "window:context/" + name, {make_native_step, windowed},
              {make_native_step, plain}, 2);
  };
  for (const int batch : {1, 4}) {
    const std::string b = "b:" + std::to_string(batch);
    add(b + "/own:32768", decode(batch, 0, 32768, 32, 8), decode(batch, 0, 1024, 32, 8));
    add(b + "/own:32768/heads:32:32", decode(batch, 0, 32768, 32, 32),
        decode(batch, 0, 1024, 32, 32));
  }
  add("b:32/shared:32704/own:64", decode(32, 32704, 64, 32, 8), decode(32, 960, 64, 32, 8));
}

struct Result {
  MedianInterval ratio;  // of the times per flop
  double seconds[2];     // medians
  double best[2];        // least
  double of_peak;        // the first one's part of the fp32 multiply-add rate, median
};

Result measure(chunkattn::ThreadPool& pool, Step& first, Step& second, int rounds) {
  std::vector<double> ratios, of_peak, seconds[2];
  std::uint64_t sink = 0;
  Step* const steps[] = {&first, &second};
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 2; ++i) {
      const int which = (i + round) % 2;
      const auto start = Clock::now();
      steps[which]->run();
      seconds[which].push_back(seconds_since(start));
    }
    of_peak.push_back(first.flops / seconds[0].back() / examples::fma_rate(pool, 100'000, sink));
    ratios.push_back(seconds[0].back() / first.flops / seconds[1].back() * second.flops);
  }
  return {median_interval(ratios),
          {median(seconds[0]), median(seconds[1])},
          {*std::min_element(seconds[0].begin(), seconds[0].end()),
           *std::min_element(seconds[1].begin(), seconds[1].end())},
          median(of_peak)};
}

struct Arguments {
  std::vector<std::string_view> filters;
  int rounds = 41;
  int threads = 0;
  int cold_mb = 0;
  bool list = false;

  [[nodiscard]] bool wants(std::string_view name) const {
    return filters.empty() || std::any_of(filters.begin(), filters.end(), [&](auto filter) {
             return name.find(filter) != std::string_view::npos;
           });
  }
};

bool parse(int argc, char** argv, Arguments& to) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const auto value = [&](std::string_view name) {
      return argument.substr(0, name.size()) == name ? argument.substr(name.size())
                                                     : std::string_view();
    };
    const auto number = [&](std::string_view name, int& into) {
      const std::string_view digits = value(name);
      return !digits.empty() &&
             std::from_chars(digits.data(), digits.data() + digits.size(), into).ptr ==
                 digits.data() + digits.size() &&
             into > 0;
    };
    if (argument == "--list")
      to.list = true;
    else if (const auto filter = value("--filter="); !filter.empty())
      to.filters.push_back(filter);
    else if (!number("--rounds=", to.rounds) && !number("--threads=", to.threads) &&
             !number("--cold=", to.cold_mb))
      return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) {
    std::fprintf(stderr,
                 "usage: pairs_bench [--filter=TEXT]... [--rounds=N] [--threads=N] [--cold=MB] "
                 "[--list]\n");
    return 2;
  }
  std::vector<Pair> pairs;
  add_builds(pairs);
  add_heads(pairs);
  add_head_dims(pairs);
  add_dot_head_dims(pairs);
  add_int8(pairs);
  add_prefill(pairs);
  add_paths(pairs);
  add_reads(pairs);
  add_windows(pairs);
  std::erase_if(pairs, [&](const Pair& pair) { return !arguments.wants(pair.name); });
  if (arguments.list) {
    for (const Pair& pair : pairs) std::printf("%s\n", pair.name.c_str());
    return 0;
  }
  chunkattn::ThreadPool pool(arguments.threads);
  const std::size_t cold_bytes =
      arguments.cold_mb > 0
          ? static_cast<std::size_t>(arguments.cold_mb) << 20
          : std::min(4 * std::max(last_level_cache_bytes(), std::size_t{64} << 20),
                     std::size_t{2} << 30);
  std::uint64_t sink = 0;
  std::printf("%d threads, %s; FMA peak %.0f GFLOP/s (measured); %d rounds\n", pool.concurrency(),
              chunkattn::describe_instruction_set().c_str(),
              examples::fma_rate(pool, 20'000'000, sink) * 1e-9, arguments.rounds);
  std::printf("%-50s %7s %15s %17s %17s %15s %8s\n", "pair", "ratio", "95 %", "median ms",
              "best ms", "GFLOP/s", "of peak");
  for (const Pair& pair : pairs) {
    const auto first = pair.first.make(pair.first.which, pool, cold_bytes);
    const auto second = pair.second.make(pair.second.which, pool, cold_bytes);
    if (!first || !second) continue;  // not built
    const Result r = measure(pool, *first, *second, arguments.rounds);
    std::printf("%-50s %7.3f %7.3f %7.3f %8.2f %8.2f %8.2f %8.2f %7.0f %7.0f %6.0f %%\n",
                pair.name.c_str(), r.ratio.median, r.ratio.low, r.ratio.high, r.seconds[0] * 1e3,
                r.seconds[1] * 1e3, r.best[0] * 1e3, r.best[1] * 1e3,
                first->flops / r.seconds[0] * 1e-9, second->flops / r.seconds[1] * 1e-9,
                r.of_peak * 100);
    std::fflush(stdout);
  }
}
