// Blocks, made from the events of a tree: the set of its full chunks whatever its spans are, each
// after its parent; and addresses to publish at.
#include <doctest/doctest.h>

#include <algorithm>
#include <chunkattn/cache/windowed_layers.hpp>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/events/cache_events.hpp>
#include <chunkattn/interop/block_table.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/cached_chunks.hpp"
#include "server/kv_blocks.hpp"
#include "server/kv_publisher.hpp"

using namespace serve;

namespace {

using Tree = chunkattn::PrefixTree<std::int32_t, 8>;

/// Follows events of blocks, as somebody who knows nothing else.
struct Subscriber {
  std::map<std::uint64_t, std::vector<int>> paths;     // by hash, from the start of the prompt
  std::map<std::uint64_t, std::vector<int>> windowed;  // those that layers with a window have

  void apply(const std::vector<BlockEvent>& changes) {
    for (const BlockEvent& change : changes) {
      auto& of_group = change.is_windowed ? windowed : paths;
      if (change.kind == BlockEvent::Kind::cleared) paths.clear(), windowed.clear();
      if (change.kind == BlockEvent::Kind::removed)
        for (const std::uint64_t hash : change.hashes) REQUIRE(of_group.erase(hash) == 1);
      if (change.kind != BlockEvent::Kind::stored) continue;
      REQUIRE(change.tokens.size() == 8 * change.hashes.size());
      std::uint64_t parent = change.parent;
      for (std::size_t i = 0; i < change.hashes.size(); ++i) {
        REQUIRE((parent == 0 || paths.contains(parent)));
        std::vector<int> path = parent == 0 ? std::vector<int>{} : paths[parent];
        const auto first = change.tokens.begin() + static_cast<std::ptrdiff_t>(8 * i);
        path.insert(path.end(), first, first + 8);
        parent = change.hashes[i];
        CHECK((parent >> 63) == 0);
        REQUIRE(of_group.emplace(parent, std::move(path)).second);
      }
    }
  }
  [[nodiscard]] std::set<std::vector<int>> all() const {
    std::set<std::vector<int>> set;
    for (const auto& [hash, path] : paths) REQUIRE(set.insert(path).second);
    return set;
  }
};

std::set<std::vector<int>> cached(const Tree& tree, bool with_tenants) {
  std::vector<std::vector<int>> paths;
  std::set<std::vector<int>> set;
  for (const CachedChunk& chunk : cached_chunks_of(tree)) {
    std::vector<int> path =
        chunk.parent < 0 ? std::vector<int>{} : paths[static_cast<std::size_t>(chunk.parent)];
    path.insert(path.end(), chunk.tokens.begin(), chunk.tokens.end());
    paths.push_back(path);
    if (with_tenants || chunk.tenant == 0) {
      // Tenants' own come apart by a token that is in no prompt.
      if (chunk.tenant != 0) path.push_back(-static_cast<int>(chunk.tenant));
      set.insert(std::move(path));
    }
  }
  return set;
}

}  // namespace

TEST_CASE("blocks are the tree's full chunks, whatever its spans are") {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    CAPTURE(seed);
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    Tree tree(chunkattn::PoolAllocator{.max_chunks = 60});
    BlockTable table(8, /*with_tenants=*/false);
    Subscriber subscriber;
    std::vector<BlockEvent> changes;
    std::size_t removed = 0;
    const chunkattn::CacheEvents events(
        tree, [&](const chunkattn::CacheEvent& event, std::span<const std::int32_t> tokens) {
          table.apply(event, tokens, changes);
        });
    for (int round = 0; round < 600; ++round) {
      std::vector<int> prompt;
      for (int i = 0, n = 1 + below(60); i < n; ++i) prompt.push_back(i % 5 == 0 ? below(3) : i);
      const std::uint64_t tenant = below(8) == 0 ? 1 : 0;
      const std::uint64_t adapter = below(20) == 0 ? static_cast<std::uint64_t>(round) + 1 : 0;
      auto sequence =
          tree.try_insert(prompt, {.name_space = {.tenant = tenant, .adapter = adapter}});
      if (!sequence) continue;
      for (auto range = sequence->loadable(); !range.empty(); range = sequence->loadable()) {
        range.length = std::min(range.length, 1 + below(12));
        sequence->mark_loaded(range);
      }
      if (below(200) == 0) tree.clear();
      sequence->leave();
      for (const BlockEvent& change : changes)
        if (change.kind == BlockEvent::Kind::removed) removed += change.hashes.size();
      subscriber.apply(std::exchange(changes, {}));
      REQUIRE(subscriber.all() == cached(tree, false));
      REQUIRE(table.num_blocks() == subscriber.paths.size());
    }
    CHECK(removed > 100);
    Subscriber late;
    late.apply(table.all());
    CHECK(late.paths == subscriber.paths);
  }
}

TEST_CASE("blocks of layers with a window are those that they have all of") {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    CAPTURE(seed);
    std::mt19937 random(static_cast<std::uint32_t>(seed));
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    Tree tree(chunkattn::PoolAllocator{.max_chunks = 60});
    // A row reads a block before it.
    chunkattn::WindowedLayers<Tree> near(
        tree, {.window = 9, .max_chunks = 30, .max_cached_chunks = seed == 1 ? 30u : 10u});
    chunkattn::AttentionPlan plan;
    BlockTable table(8, /*with_tenants=*/false, /*with_windows=*/true);
    BlockTable full(8, /*with_tenants=*/false);
    Subscriber subscriber, of_full;
    std::vector<BlockEvent> changes, full_changes;
    std::size_t removed = 0, most = 0;
    const chunkattn::CacheEvents events(
        tree,
        [&](const chunkattn::CacheEvent& event, std::span<const std::int32_t> tokens) {
          table.apply(event, tokens, changes);
          full.apply(event, tokens, full_changes);
        },
        1, near);
    for (int round = 0; round < 500; ++round) {
      std::vector<int> prompt;
      for (int i = 0, n = 1 + below(60); i < n; ++i) prompt.push_back(i % 5 == 0 ? below(3) : i);
      const std::uint64_t tenant = below(8) == 0 ? 1 : 0;
      auto sequence = tree.try_insert(prompt, {.name_space = {.tenant = tenant}});
      if (!sequence) continue;
      near.resume(*sequence);
      while (sequence->num_uncomputed() > 0) {
        auto step = tree.begin_step();
        if (!step.add(*sequence, static_cast<std::size_t>(1 + below(20)))) break;
        (void)near.view(plan.build(step));
        auto finished = std::move(step).finish();
        for (const auto& row : finished.rows()) finished.commit(row, 1);
        if (sequence->size() > prompt.size() + static_cast<std::size_t>(below(12))) break;
      }
      if (below(100) == 0) tree.clear();
      sequence.reset();
      for (const BlockEvent& change : changes)
        if (change.is_windowed && change.kind == BlockEvent::Kind::removed)
          removed += change.hashes.size();
      subscriber.apply(std::exchange(changes, {}));
      of_full.apply(std::exchange(full_changes, {}));
      REQUIRE(of_full.paths == subscriber.paths);
      std::set<std::vector<int>> expected, held;
      for (const auto& path : cached(tree, false))
        if (near.find(path) == path.size()) expected.insert(path);
      for (const auto& [hash, path] : subscriber.windowed) {
        REQUIRE(subscriber.paths.at(hash) == path);
        REQUIRE(held.insert(path).second);
      }
      REQUIRE(held == expected);
      most = std::max(most, held.size());
    }
    CHECK(removed > 100);
    CHECK(most > 5);
    CHECK(of_full.windowed.empty());
    Subscriber late;
    late.apply(table.all());
    CHECK(late.paths == subscriber.paths);
    CHECK(late.windowed == subscriber.windowed);
  }
}

TEST_CASE("tenants with a salt have blocks of their own, where they are asked for") {
  Tree tree({.max_chunks = 100});
  BlockTable table(8, /*with_tenants=*/true);
  std::vector<BlockEvent> changes;
  const chunkattn::CacheEvents events(
      tree, [&](const chunkattn::CacheEvent& event, std::span<const std::int32_t> tokens) {
        table.apply(event, tokens, changes);
      });
  const std::vector<int> prompt(16, 7);
  for (const std::uint64_t tenant : {0u, 1u, 2u}) {
    auto sequence = tree.insert(prompt, {.name_space = {.tenant = tenant}});
    sequence.mark_loaded(sequence.loadable());
    sequence.leave();
  }
  std::set<std::uint64_t> hashes;
  for (const BlockEvent& change : changes)
    for (const std::uint64_t hash : change.hashes) CHECK(hashes.insert(hash).second);
  CHECK(hashes.size() == 6);
  CHECK(cached(tree, true).size() == 6);
}

TEST_CASE("addresses are of this machine unless another is named") {
  const auto both = [](const std::string& text) {
    const PublisherOptions options = publisher_addresses(text);
    return options.address + " " + options.replay;
  };
  CHECK(both("5557") == "tcp://127.0.0.1:5557 tcp://127.0.0.1:5558");
  CHECK(both("tcp://5557") == "tcp://127.0.0.1:5557 tcp://127.0.0.1:5558");
  CHECK(both("0.0.0.0:1") == "tcp://0.0.0.0:1 tcp://0.0.0.0:2");
  CHECK(both("tcp://*:5557") == "tcp://*:5557 tcp://*:5558");
  CHECK(both("tcp://[::1]:5557") == "tcp://[::1]:5557 tcp://[::1]:5558");
  CHECK(both("ipc:///tmp/kv") == "ipc:///tmp/kv ipc:///tmp/kv.replay");
  for (const char* text :
       {"", "port", "65535", "0", "-1", ":5557", "1:2x", "udp://a:5", "ipc://"}) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS((void)publisher_addresses(text),
                         (std::string("--kv-events = ") + text +
                          ": expected a port below 65535, HOST:PORT, tcp://HOST:PORT or ipc://FILE")
                             .c_str(),
                         std::invalid_argument);
  }
}
