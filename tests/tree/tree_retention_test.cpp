// Retention: what is evicted, in which order, and what is not; tenants; threads. Pins are in
// pin_test.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <list>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/cache_events.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

/// Joins, computes everything and leaves.
template <class Tree>
std::size_t pass(Tree& tree, const std::vector<typename Tree::token_type>& prompt,
                 InsertOptions o = {}) {
  o.compute_last = false;
  auto s = tree.insert(prompt, o);
  const std::size_t cached = s.num_cached();
  test::load(s);
  return cached;
}

// ---- an independent LRU: a plain trie of tokens' chunks with explicit nodes and one list
// ----------

/// Leaf-first LRU over a radix trie of (first token key) edges, in whole chunks: written from the
/// rule alone. Each node is one run of tokens; a run's chunks are counted from its own start.
class LruSimulation {
 public:
  LruSimulation(std::size_t capacity, int chunk_size)
      : capacity_(capacity), chunk_size_(chunk_size) {}

  /// Tokens found; then the path is the most recently used.
  std::size_t pass(const std::vector<int>& prompt) {
    std::vector<Node*> path;
    Node* at = &root_;
    std::size_t position = 0;
    while (position < prompt.size()) {
      const auto it = at->children.find(prompt[position]);
      if (it == at->children.end()) break;
      Node* child = it->second.get();
      std::size_t common = 0;
      while (common < child->tokens.size() && position + common < prompt.size() &&
             child->tokens[common] == prompt[position + common])
        ++common;
      if (common < child->tokens.size()) child = split(child, common);
      position += common;
      path.push_back(child);
      at = child;
    }
    const std::size_t found = position;
    for (Node* n : path) n->used = true;
    if (position < prompt.size()) {
      auto fresh = std::make_unique<Node>();
      fresh->tokens.assign(prompt.begin() + static_cast<std::ptrdiff_t>(position), prompt.end());
      fresh->parent = at;
      // A run continues in the free slots of its parent's last chunk if no other does.
      fresh->begin = at != &root_ && !at->continued && at->end() < chunk_size_ ? at->end() : 0;
      const std::size_t needed = new_chunks(*fresh);
      while (chunks_ + needed > capacity_) evict();
      // Evicting may have given the slots after the parent back.
      if (fresh->begin == 0 && at != &root_ && !at->continued && at->end() < chunk_size_)
        fresh->begin = at->end();
      if (fresh->begin > 0) at->continued = true;
      chunks_ += new_chunks(*fresh);
      Node* n = fresh.get();
      n->used = true;
      at->children[n->tokens[0]] = std::move(fresh);
      path.push_back(n);
    }
    for (std::size_t i = path.size(); i-- > 0;) {  // deepest first: children are older
      path[i]->used = false;
      recency_.remove(path[i]);
      recency_.push_back(path[i]);
    }
    return found;
  }

  [[nodiscard]] std::size_t chunks() const { return chunks_; }
  std::vector<std::pair<int, int>> victims;  // position and length of what was evicted, in order

 private:
  struct Node {
    Node* parent = nullptr;
    std::map<int, std::unique_ptr<Node>> children;
    std::vector<int> tokens;
    int begin = 0;           // offset in the first chunk
    bool continued = false;  // a child holds the slots after the last token
    bool used = false;

    [[nodiscard]] int end_offset(int chunk_size) const {
      return (begin + static_cast<int>(tokens.size()) - 1) % chunk_size + 1;
    }
    [[nodiscard]] int end() const { return end_offset(node_chunk_size); }
    static inline int node_chunk_size = 0;
  };

 public:
  static void set_chunk_size(int chunk_size) { Node::node_chunk_size = chunk_size; }

 private:
  [[nodiscard]] std::size_t new_chunks(const Node& n) const {
    const auto all = static_cast<std::size_t>(n.begin) + n.tokens.size();
    const auto c = static_cast<std::size_t>(chunk_size_);
    return (all + c - 1) / c - (n.begin > 0 ? 1 : 0);
  }

  Node* split(Node* lower, std::size_t keep) {
    Node* parent = lower->parent;
    const int key = lower->tokens[0];
    auto owned = std::move(parent->children[key]);
    auto upper = std::make_unique<Node>();
    Node* u = upper.get();
    u->parent = parent;
    u->begin = lower->begin;
    u->tokens.assign(lower->tokens.begin(),
                     lower->tokens.begin() + static_cast<std::ptrdiff_t>(keep));
    lower->tokens.erase(lower->tokens.begin(),
                        lower->tokens.begin() + static_cast<std::ptrdiff_t>(keep));
    lower->begin = (u->begin + static_cast<int>(keep)) % chunk_size_;
    u->continued = lower->begin > 0;
    lower->parent = u;
    u->children[lower->tokens[0]] = std::move(owned);
    parent->children[key] = std::move(upper);
    recency_.insert(std::next(std::find(recency_.begin(), recency_.end(), lower)), u);
    return u;
  }

  /// The least recently used leaf loses what it has in its last chunk.
  void evict() {
    for (auto it = recency_.begin(); it != recency_.end(); ++it) {
      Node* n = *it;
      if (n->used) continue;
      const auto last = static_cast<std::size_t>(n->end());
      const bool one_chunk = static_cast<std::size_t>(n->begin) + n->tokens.size() <=
                             static_cast<std::size_t>(chunk_size_);
      int position = 0;
      for (const Node* up = n->parent; up != nullptr; up = up->parent)
        position += static_cast<int>(up->tokens.size());
      const std::size_t lost = one_chunk ? n->tokens.size() : last;
      victims.emplace_back(position + static_cast<int>(n->tokens.size() - lost),
                           static_cast<int>(lost));
      if (!one_chunk) {
        n->tokens.resize(n->tokens.size() - last);
        --chunks_;
        return;
      }
      if (n->begin == 0)
        --chunks_;
      else
        n->parent->continued = false;
      recency_.erase(it);
      n->parent->children.erase(n->tokens[0]);
      return;
    }
    throw std::logic_error("nothing to evict");
  }

  Node root_;
  std::list<Node*> recency_;
  std::size_t capacity_;
  int chunk_size_;
  std::size_t chunks_ = 0;
};

}  // namespace

TEST_CASE("LRU victims equal those of an independent simulation, on the trace") {
  const char* data = std::getenv("CHUNKATTN_DATA");
  const std::filesystem::path file =
      std::filesystem::path(data != nullptr ? data : CHUNKATTN_SOURCE_DIR "/../shared") /
      "traces/mooncake_conversation_trace.jsonl";
  std::ifstream in(file);
  if (!in) {
    std::printf("skipped: no %s (set CHUNKATTN_DATA)\n", file.c_str());
    return;
  }
  constexpr int chunk_size = 16;
  test::Random random(3);
  LruSimulation::set_chunk_size(chunk_size);
  for (const std::size_t budget :
       {std::size_t{1500}, static_cast<std::size_t>(test::scaled(20000))}) {
    CAPTURE(budget);
    in.clear();
    in.seekg(0);
    PrefixTree<int, chunk_size> tree(PoolAllocator{.max_chunks = budget});
    LruSimulation lru(budget, chunk_size);
    std::vector<std::pair<int, int>> evicted;
    const CacheEvents events(tree, [&](const CacheEvent& e, std::span<const int>) {
      if (e.kind == CacheEvent::Kind::evicted) evicted.emplace_back(e.position, e.length);
    });
    std::string line;
    std::size_t hits = 0, tokens = 0, evictions = 0;
    const int lines = test::scaled(1200);
    for (int i = 0; i < lines && std::getline(in, line); ++i) {
      // Each id of the trace stands for a block; its length is jittered, so that prompts part
      // inside chunks. The last block is cut at a random position.
      std::vector<int> prompt;
      const std::size_t open = line.find("\"hash_ids\": [");
      const char* at = line.c_str() + open + 13;
      while (*at != ']') {
        char* end = nullptr;
        const int id = static_cast<int>(std::strtol(at, &end, 10));
        const int length = 5 + id * 7919 % 23;
        for (int k = 0; k < length; ++k) prompt.push_back(id * 32 + k);
        at = *end == ',' ? end + 2 : end;
      }
      prompt.resize(prompt.size() - random.index(5));
      if (prompt.size() / chunk_size + 2 > budget) continue;
      const std::size_t found = pass(tree, prompt);
      REQUIRE(found == lru.pass(prompt));
      REQUIRE(tree.stats().used_chunks == lru.chunks());
      REQUIRE(evicted == lru.victims);
      evictions += evicted.size();
      evicted.clear();
      lru.victims.clear();
      hits += found;
      tokens += prompt.size();
      if (i % 50 == 0) check_invariants(tree);
    }
    CHECK(hits > 0);
    CHECK(evictions > 100);
    CHECK(tree.stats().splits_inside_chunk > (budget > 1500 ? 20u : 0u));
    std::printf("budget %zu chunks: %.1f %% of %zu tokens found, %zu evictions\n", budget,
                100.0 * static_cast<double>(hits) / static_cast<double>(tokens), tokens, evictions);
  }
}

TEST_CASE(
    "watermarks: above the high one the cache shrinks to the low one when a sequence leaves") {
  PrefixTree<int, 4> tree({}, {}, RetentionOptions{.high_watermark = 10, .low_watermark = 6});
  for (int i = 0; i < 10; ++i) pass(tree, iota(100 * i, 4));
  CHECK(tree.stats().used_chunks == 10);
  pass(tree, iota(5000, 4));
  CHECK(tree.stats().used_chunks == 6);
  CHECK(tree.match_prefix(iota(5000, 4)).cached == 4);
  CHECK(tree.match_prefix(iota(400, 4)).cached == 0);
  CHECK(tree.match_prefix(iota(500, 4)).cached == 4);
  check_invariants(tree);
}

TEST_CASE("clear: what live sequences had before is never found again, generated or not") {
  for (const TreeOptions::Sharing sharing :
       {TreeOptions::Sharing::token, TreeOptions::Sharing::chunk}) {
    PrefixTree<int, 4> tree({}, {.sharing = sharing});
    auto a =
        tree.insert(iota(0, 3));  // under TreeOptions::Sharing::chunk all of it is a private tail
    auto b = tree.insert(iota(50, 12));
    test::load(a);
    test::load(b);
    a.append(iota(3, 9));
    b.append(iota(62, 8));
    test::load(a);
    tree.clear();
    test::load(b);
    auto fork = b.fork();
    a.leave();
    b.leave();
    CHECK(tree.match_prefix(iota(0, 12)).cached == 0);
    CHECK(tree.match_prefix(iota(50, 20)).cached == 0);
    CHECK(fork.tokens() == iota(50, 20));
    check_invariants(tree);
    fork.leave();
    CHECK(tree.match_prefix(iota(50, 20)).cached == 0);
    pass(tree, iota(50, 20));  // what is computed from now on is
    CHECK(tree.match_prefix(iota(50, 20)).cached == 20);
    check_invariants(tree);
  }
}

TEST_CASE(
    "by priority: the lowest goes first, then the least recently used; parents after children") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 6}, {}, {.by_priority = true});
  pass(tree, iota(100, 4), {.priority = 2});
  pass(tree, iota(200, 4), {.priority = 1});
  pass(tree, iota(300, 4), {.priority = 1});
  pass(tree, iota(400, 4), {.priority = -1});
  pass(tree, iota(500, 4), {.priority = 2});
  std::vector<int> longer = iota(400, 4);
  longer.push_back(7);
  pass(tree, longer, {.priority = 1});  // raises its whole path
  CHECK(tree.stats().used_chunks == 6);
  const auto alive = [&] {
    std::string text;
    for (int id : {100, 200, 300, 400, 500})
      text += tree.match_prefix(iota(id, 4)).cached == 4 ? '1' : '0';
    return text;
  };
  CHECK(alive() == "11111");
  pass(tree, iota(9000, 4), {.priority = 9});
  CHECK(alive() == "10111");
  pass(tree, iota(9100, 4), {.priority = 9});
  CHECK(alive() == "10011");
  pass(tree, iota(9200, 4), {.priority = 9});
  CHECK(tree.match_prefix(longer).cached == 4);  // the leaf of 400 went
  CHECK(alive() == "10011");
  pass(tree, iota(9300, 4), {.priority = 9});
  CHECK(alive() == "10001");
  pass(tree, iota(9400, 4), {.priority = 9});
  CHECK(alive() == "00001");
  check_invariants(tree);
}

TEST_CASE("by priority: of thousands of levels the lowest goes that has anything") {
  for (const bool learns : {false, true}) {
    PrefixTree<int, 4, PoolAllocator, CachePolicy> tree(PoolAllocator{.max_chunks = 50}, {},
                                                        {{.learns = learns, .by_priority = true}});
    test::Random random(7);
    std::map<int, int> cached;  // of a priority, its one prompt
    std::vector<int> used_before;
    for (int i = 0; i < test::scaled(learns ? 300 : 5000); ++i) {
      int level = random.uniform(-1'000'000, 1'000'000);
      if (!used_before.empty() && random.uniform(0, 1) == 0)
        level = used_before[random.index(used_before.size())];
      if (cached.contains(level)) continue;
      used_before.push_back(level);
      if (cached.size() == 50) cached.erase(cached.begin());
      cached[level] = 4 * i;
      pass(tree, iota(4 * i, 4), {.priority = level});
      if (i % 20 != 0) continue;
      const std::size_t left = cached.size() - cached.size() / 8;
      tree.trim(left);
      while (cached.size() > left) cached.erase(cached.begin());
      for (const auto& [priority, first] : cached)
        REQUIRE(tree.match_prefix(iota(first, 4), {.compute_last = false}).cached == 4);
      check_invariants(tree);
    }
  }
}

TEST_CASE("by priority: what a fork computes is kept at the level of its source") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 4}, {}, {.by_priority = true});
  const auto load = [](auto& sequence) { sequence.mark_loaded(sequence.loadable()); };
  const std::vector<int> important{7, 7, 7, 7}, prompt{1, 2, 3, 4}, next{8, 8, 8, 8};
  {
    auto kept = tree.insert(important, {.priority = 2});
    load(kept);
  }
  auto source = tree.insert(prompt, {.priority = 1});
  load(source);
  auto fork = source.fork();
  for (const int token : {5, 6, 7, 8}) fork.append(token);
  load(fork);
  source.leave();
  fork.leave();
  CHECK(tree.stats().retained_chunks == 3);
  auto first = tree.insert(next), second = tree.insert(std::vector<int>{9, 9, 9, 9});
  CHECK(tree.match_prefix(important).cached == 4);  // the fork's own tokens were less important
  CHECK(tree.match_prefix(std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}).cached == 4);
}

TEST_CASE("only one watermark set: a leave evicts down to it, no further") {
  PrefixTree<int, 4> tree({}, {}, RetentionOptions{.high_watermark = 3});
  for (int i = 0; i < 5; ++i) {
    pass(tree, iota(100 * i, 4));
    CHECK(tree.stats().used_chunks == static_cast<std::size_t>(std::min(i + 1, 3)));
  }
  for (int i = 0; i < 5; ++i)
    CHECK(tree.match_prefix(iota(100 * i, 4)).cached == (i < 2 ? 0u : 4u));
  CHECK(chunkattn::detail::TreeAccess::core(tree).retention.options().low_watermark == 3);
  check_invariants(tree);
}

TEST_CASE("one tenant cannot observe another's prompt, by hits, admission, or chunks") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 100});
  const std::vector<int> secret = iota(0, 20);
  std::vector<InsertOptions> others;
  for (const std::uint64_t tenant : {0u, 1u, 2u, 7u})
    for (const std::uint64_t adapter : {0u, 1u, 2u, 7u})
      for (const std::size_t public_length : {0u, 3u, 8u, 20u, 100u})
        others.push_back(
            {.name_space = {.tenant = tenant, .adapter = adapter}, .public_length = public_length});
  for (const Namespace owner : {Namespace{.tenant = 7, .adapter = 2}, Namespace{}}) {
    tree.clear();
    pass(tree, secret, {.name_space = owner});
    CHECK(tree.match_prefix(secret, {.name_space = owner}).cached == 20);
    std::size_t guesses = 0;
    for (const InsertOptions& o : others) {
      if (o.name_space == owner && o.public_length == 0) continue;
      ++guesses;
      for (std::size_t n = 1; n <= secret.size(); ++n) {
        const std::vector<int> guess(secret.begin(),
                                     secret.begin() + static_cast<std::ptrdiff_t>(n));
        CHECK(tree.match_prefix(guess, o).cached + tree.match_prefix(guess, o).pending == 0);
        CHECK(tree.chunks_needed(guess, o) == (n + 3) / 4);  // as for tokens never seen
      }
    }
    CHECK(guesses == others.size() - 1);
  }
  // A public prefix is shared by every tenant of the adapter; what follows is not.
  tree.clear();
  pass(tree, secret, {.name_space = {.tenant = 1}, .public_length = 10});
  CHECK(tree.match_prefix(secret, {.name_space = {.tenant = 2}, .public_length = 10}).cached == 10);
  CHECK(tree.match_prefix(secret, {.name_space = {.tenant = 1}, .public_length = 10}).cached == 20);
  CHECK(tree.match_prefix(secret, {.name_space = {.tenant = 2, .adapter = 1}, .public_length = 10})
            .cached == 0);
  CHECK(tree.match_prefix(secret, {.name_space = {.tenant = 2}}).cached == 0);
}

TEST_CASE("const queries run at the same time as each other") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 500});
  for (int i = 0; i < 50; ++i) pass(tree, iota(i % 7 * 3, 20));
  auto s = tree.insert(iota(0, 30));
  std::vector<std::thread> threads;
  std::atomic<std::size_t> sum{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::size_t local = 0;
      for (int i = 0; i < 500; ++i) {
        const std::vector<int> prompt = iota((i + t) % 9 * 3, 25);
        local += tree.match_prefix(prompt).cached + tree.chunks_needed(prompt) +
                 tree.chunks_available() + tree.stats().nodes + tree.num_chunks() + s.size() +
                 s.num_pending() + s.num_written() + s.num_uncomputed() +
                 static_cast<std::size_t>(s.loadable().begin) + s.tokens().size() +
                 s.chunks_needed(5) + static_cast<std::size_t>(tree.version());
        if (i % 100 == 0) check_invariants(tree);
      }
      sum += local;
    });
  for (auto& thread : threads) thread.join();
  CHECK(sum > 0);
}
