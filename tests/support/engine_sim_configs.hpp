// The configurations of the engine simulation, shared by the test and by ./dev fuzz.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/engine_sim_run.hpp"

namespace test {

/// A configuration is a number, so that a run can be repeated.
struct SimConfig {
  std::string name;
  SimOptions options;
  bool for_caches = false;  // needs a policy that retains
};

inline std::vector<SimConfig> sim_configs(int chunk_size, bool by_priority = false) {
  std::vector<SimConfig> all;
  const auto c = static_cast<std::size_t>(chunk_size);
  const bool is_large = chunk_size > 16;  // what the model does grows with the tokens
  for (const auto sharing : {TreeOptions::Sharing::token, TreeOptions::Sharing::chunk})
    for (const std::optional<int> min_run : {std::optional<int>{}, {1}, {chunk_size}}) {
      if (sharing == TreeOptions::Sharing::chunk && min_run) continue;
      SimOptions o;
      o.tree = {.sharing = sharing, .min_run = min_run};
      o.max_prompt = 6 + (is_large ? 2 : 4) * c;
      o.max_length = 30 + (is_large ? 4 : 14) * c;
      o.retention.max_pinned = 40;
      o.by_priority = by_priority;
      o.max_checkpoints = 40;
      o.max_checkpoints_per_path = 6;
      const std::string rule = (sharing == TreeOptions::Sharing::token ? "token" : "chunk") +
                               std::string(", min_run ") +
                               (min_run ? std::to_string(*min_run) : "unset");
      o.retention.high_watermark = max_pool_chunks;
      all.push_back({rule + ", no limit", o});
      o.retention.high_watermark = chunkattn::RetentionOptions::no_watermark;
      SimOptions few = o;  // few sequences that meet often
      few.retention.max_pinned = 3;
      few.max_checkpoints = 9;
      few.max_checkpoints_per_path = 2;
      few.max_live = 6;
      few.letters = 2;
      few.many_namespaces = false;
      all.push_back({rule + ", few sequences", few});
      o.budget = 160;
      all.push_back({rule + ", cache is evicted", o});
      o.max_checkpoints = 0;
      o.learns = true;
      all.push_back({rule + ", cache is evicted by what was learnt", o, true});
      o.fair = true;
      o.learns = !min_run;
      all.push_back({rule + ", tenants have shares", o, true});
      o.learns = o.fair = false;
      o.max_checkpoints = 16;
      o.budget = 45;
      o.retention.max_pinned = 8;
      all.push_back({rule + ", out of chunks", o});
      few.budget = 14;
      all.push_back({rule + ", few sequences, out of chunks", few});
      o.budget = 200;
      o.retention.high_watermark = 70;
      o.retention.low_watermark = 50;
      all.push_back({rule + ", watermarks", o, true});
    }
  return all;
}

/// Every kind of event that a long simulation must have seen.
inline constexpr const char* sim_events[] = {
    "abandoned after it ran",
    "abandoned before it ran",
    "abandoned step resolved",
    "add behind an output to come",
    "add failed",
    "add of a part",
    "add to the end",
    "add up to what another is to write",
    "add waits for a sequence",
    "add waits for a step",
    "add waits for the step of one that left",
    "a branch aside right",
    "a part of the trunk right",
    "add with a tree",
    "add with a tree of unknown drafts",
    "add with drafts",
    "add with unknown drafts",
    "admitted",
    "admitted on another thread",
    "all drafts right",
    "all drafts wrong",
    "allocator had none after all",
    "allocator lied",
    "allocator threw",
    "append",
    "append failed",
    "append refused",
    "append under steps in flight",
    "begin_step refused",
    "cancelled",
    "cancelled after it ran",
    "cancelled after it was built",
    "cancelled while it waited",
    "cached within a quota",
    "came back",
    "checkpoint",
    "checkpoint refused",
    "checkpoint that was there",
    "checkpoint where one was wanted",
    "checkpoints from now on",
    "clear",
    "columns from now on",
    "commit of a branch refused",
    "commit of all out of order",
    "commit of other drafts refused",
    "commit out of order",
    "computed twice rather than waited for",
    "crowd of threads",
    "crowd: dropped without the lock",
    "crowd: steps dropped in flight",
    "decode step",
    "device idle",
    "draft wrong under later steps",
    "dropped step ran late",
    "dropped while the tree was another thread's",
    "event lost",
    "event repeated",
    "events asked for again",
    "events asked for late",
    "everybody",
    "everybody, but out of chunks",
    "evicted chunks",
    "evicted tokens",
    "expired",
    "family of forks",
    "finished out of order",
    "finished step dropped on another thread",
    "finished step moved",
    "fork",
    "fork at an earlier length",
    "fork beside outputs to come",
    "fork copied its tail",
    "fork failed",
    "fork of a sequence in a step",
    "fork of what is public",
    "fork shared its tail",
    "found again after leaving",
    "found what only the cache has",
    "hand-over",
    "hostile event refused",
    "hostile event refused beside true ones",
    "hostile event taken",
    "hostile snapshot loaded",
    "insert",
    "insert failed",
    "insert found cached",
    "insert found pending",
    "insert of what was preempted",
    "insert with a public prefix",
    "insert with nothing to compute",
    "known draft",
    "known draft behind a step that was dropped",
    "known draft that was given up",
    "leave",
    "left a step in flight",
    "left a step that was built",
    "left a tier",
    "left an open step",
    "left before its output was committed",
    "left in the middle of a prefill",
    "left on another thread",
    "left on the thread that called the tree",
    "left while waiting for another",
    "load",
    "load refused",
    "loaded beside checkpoints",
    "loaded from a tier",
    "loaded where tiers fail",
    "memory ran out: add",
    "memory ran out: admit",
    "memory ran out: begin_step",
    "memory ran out: build",
    "memory ran out: fork",
    "memory ran out: insert",
    "memory ran out: mirror",
    "memory ran out: save a checkpoint",
    "memory ran out: set values",
    "memory ran out: set values of a step",
    "memory ran out: swap_out",
    "match with a checkpoint",
    "merged tokens",
    "mirror compared",
    "mirror compared beside hostile events",
    "mirror recovered by a snapshot",
    "mirror recovered by replay",
    "not admitted",
    "observer of tiers compared",
    "open step moved",
    "other terms for a tenant",
    "output committed",
    "output given up",
    "output given up under later steps",
    "overtaken",
    "pin",
    "pin moved",
    "pin of a part",
    "pin refused",
    "plan advanced",
    "plan moved",
    "plan rebuilt",
    "prompt with values",
    "prompt without values",
    "published tokens",
    "ranked with a prefix",
    "resume",
    "resume after clear",
    "resume beside a step that writes the same",
    "resume failed",
    "resume without what was shared",
    "rows behind a draft that was wrong",
    "rows copied",
    "rows of a void step",
    "sequence moved",
    "some drafts right",
    "split between chunks",
    "split inside a chunk",
    "start at a checkpoint",
    "start at a checkpoint before what is cached",
    "start without a checkpoint",
    "step dropped on another thread",
    "step finished",
    "step in flight moved",
    "step submitted",
    "step that was moved from refused",
    "step with garbage",
    "submitted before it was built",
    "swap out",
    "swap out before an output was committed",
    "swap out before drafts were accepted",
    "swap out of a step",
    "take over",
    "take over left to a step",
    "tier fault",
    "tree destroyed first",
    "tree moved",
    "truncate",
    "truncate failed",
    "truncated in flight",
    "unknown token",
    "unpin",
    "unpin on another thread",
    "value found again after leaving",
    "values of a step left out",
    "values of a step set",
    "values refused",
    "values set",
    "view moved",
};

/// As a table of Markdown.
inline void print_counters(const Counters& counters) {
  std::puts("| event | times |\n| --- | --- |");
  for (const auto& [what, n] : counters) {
    std::string digits = std::to_string(n);
    for (std::size_t i = digits.size(); i > 3;) digits.insert(i -= 3, 1, ',');
    std::printf("| %s | %s |\n", what.c_str(), digits.c_str());
  }
}

/// Operations on one tree before the next one is made.
inline constexpr int sim_round = 1500;

/// What went wrong, with the operations before.
struct SimFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Runs one simulation on a fresh tree; throws SimFailure.
template <class Retention, int ChunkSize>
void run_sim(const SimConfig& config, std::uint64_t seed, int operations, Counters& counters) {
  RandomChoices choices(seed);
  EngineSim<Retention, ChunkSize> sim(choices, config.options, counters);
  int i = 0;
  try {
    for (; i < operations; ++i) {
      sim.operate();
      if (i % 16 == 0) sim.check_all();
    }
    sim.check_all();
    sim.end();
  } catch (const std::exception& error) {
    throw SimFailure(config.name + ", seed " + std::to_string(seed) + ", operation " +
                     std::to_string(i) + ": " + error.what() + "\n" + sim.history());
  }
}

}  // namespace test
