// examples/persist/chunk_file.hpp: what is saved comes back bit for bit, and any other file is
// refused whole.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "examples/persist/chunk_file.hpp"
#include "support/random.hpp"

using namespace chunkattn;
using test::Random;

namespace {

using Tree = PrefixTree<int, 8>;
using Prompts = std::vector<persist::CachedPrompt<int>>;
constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 2, .head_dim = 8};

struct TemporaryFile {
  explicit TemporaryFile(const std::string& name)
      : path((std::filesystem::temp_directory_path() /
              (name + std::to_string(test::run_seed()) + ".chunks"))
                 .string()) {}
  ~TemporaryFile() { std::filesystem::remove(path); }
  std::string path;
};

float value(const std::vector<int>& tokens, int position, int layer, int head, int i) {
  std::uint32_t hash = 17;
  for (int p = 0; p <= position; ++p)
    hash = hash * 31 + static_cast<std::uint32_t>(tokens[static_cast<std::size_t>(p)]);
  return static_cast<float>((hash + static_cast<std::uint32_t>(layer * 100 + head * 10 + i)) % 251);
}

template <class Sequence, class Cache>
void compute(Sequence& sequence, Cache& cache) {
  const auto tokens = sequence.tokens();
  for_each_kv_span(sequence, sequence.loadable(), cache, [&](const auto& span) {
    for (int t = 0; t < span.length; ++t)
      for (int i = 0; i < geometry.head_dim; ++i) {
        const float x = value(tokens, span.position + t, span.layer, span.kv_head, i);
        span.k[t * span.stride_token + i] = x;
        span.v[t * span.stride_token + i] = -x;
      }
  });
  sequence.mark_loaded(sequence.loadable());
}

template <class Sequence, class Cache>
int wrong(const Sequence& sequence, std::size_t length, Cache& cache) {
  const auto tokens = sequence.tokens();
  int count = 0;
  for_each_kv_span(sequence, {0, static_cast<std::int32_t>(length)}, cache, [&](const auto& span) {
    for (int t = 0; t < span.length; ++t)
      for (int i = 0; i < geometry.head_dim; ++i) {
        const float x = value(tokens, span.position + t, span.layer, span.kv_head, i);
        count += span.k[t * span.stride_token + i] != x;
        count += span.v[t * span.stride_token + i] != -x;
      }
  });
  return count;
}

std::vector<char> read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_all(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

Prompts random_prompts(Random& random, int count) {
  Prompts prompts(static_cast<std::size_t>(count));
  for (auto& prompt : prompts) {
    prompt.tokens.resize(static_cast<std::size_t>(random.uniform(1, 40)));
    for (int& token : prompt.tokens) token = random.uniform(0, 1);
    prompt.name_space.tenant = static_cast<std::uint64_t>(random.uniform(0, 1));
  }
  return prompts;
}

/// Saves random prompts; returns how many tokens' K/V went into the file.
std::size_t save_some(const std::string& path, const Prompts& prompts) {
  Tree tree(PoolAllocator{.max_chunks = 1000});
  KvCache<Cpu, float> cache(tree, geometry);
  for (const auto& prompt : prompts) {
    auto sequence = tree.insert(prompt.tokens, {.name_space = prompt.name_space});
    compute(sequence, cache);
  }
  const std::size_t distinct = tree.stats().stored_tokens;
  const std::size_t saved =
      persist::save(path, tree, cache, "m", std::span<const persist::CachedPrompt<int>>(prompts));
  CHECK(saved == distinct);  // every token once, however many prompts share it
  check_invariants(tree);
  return saved;
}

template <class T = float, int ChunkSize = 8>
std::string refusal(const std::string& path, const std::string& tag = "m",
                    KvCacheOptions options = geometry) {
  PrefixTree<int, ChunkSize> tree(PoolAllocator{.max_chunks = 1000});
  KvCache<Cpu, T> cache(tree, options);
  std::string message;
  try {
    (void)persist::load(path, tree, cache, tag);
  } catch (const persist::FileError& error) {
    message = error.what();
  }
  if (!message.empty()) CHECK(tree.stats().inserts == 0);
  return message;
}

}  // namespace

TEST_CASE("what was saved is a hit after loading, bit for bit, also with other chunk sizes") {
  Random random(1);
  for (int round = 0; round < test::scaled(20); ++round) {
    const TemporaryFile file("round_trip");
    const Prompts prompts = random_prompts(random, random.uniform(1, 12));
    const std::size_t saved = save_some(file.path, prompts);
    PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 1000});
    KvCache<Cpu, float> cache(tree, geometry);
    CHECK(persist::load(file.path, tree, cache, "m") == saved);
    CHECK(persist::load(file.path, tree, cache, "m") == 0);  // all there already
    for (const auto& prompt : prompts) {
      const auto sequence =
          tree.insert(prompt.tokens, {.name_space = prompt.name_space, .compute_last = false});
      REQUIRE(sequence.num_cached() == prompt.tokens.size());
      CHECK(wrong(sequence, prompt.tokens.size(), cache) == 0);
    }
    check_invariants(tree);
  }
}

TEST_CASE("a small budget loads what fits, and only whole prefixes") {
  Random random(2);
  for (int round = 0; round < test::scaled(20); ++round) {
    const TemporaryFile file("budget");
    const Prompts prompts = random_prompts(random, 12);
    save_some(file.path, prompts);
    Tree tree(PoolAllocator{.max_chunks = static_cast<std::size_t>(random.uniform(1, 8))});
    KvCache<Cpu, float> cache(tree, geometry);
    (void)persist::load(file.path, tree, cache, "m");
    check_invariants(tree);
    for (const auto& prompt : prompts) {
      const auto sequence = tree.try_insert(prompt.tokens, {.name_space = prompt.name_space});
      if (sequence) CHECK(wrong(*sequence, sequence->num_cached(), cache) == 0);
    }
  }
}

TEST_CASE("every truncation and every flipped bit is refused, with the cache untouched") {
  Random random(3);
  const TemporaryFile file("damage"), bad("damaged");
  save_some(file.path, random_prompts(random, 3));
  const std::vector<char> good = read_all(file.path);
  CHECK(refusal(file.path).empty());
  for (int i = 0; i < test::scaled(400); ++i) {
    auto bytes = good;
    // The header first, bit by bit; then anywhere.
    const std::size_t at = i < 160 ? static_cast<std::size_t>(i) / 2 : random.index(good.size());
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.uniform(0, 7)));
    write_all(bad.path, bytes);
    REQUIRE(!refusal(bad.path).empty());
  }
  for (int i = 0; i < test::scaled(200); ++i) {
    auto bytes = good;
    bytes.resize(i < 100 ? static_cast<std::size_t>(i) : random.index(good.size()));
    write_all(bad.path, bytes);
    REQUIRE(!refusal(bad.path).empty());
  }
  auto longer = good;
  longer.push_back(0);
  write_all(bad.path, longer);
  CHECK(refusal(bad.path).find("truncated or extended") != std::string::npos);
}

TEST_CASE("foreign and mismatching files are refused with the reason") {
  Random random(4);
  const TemporaryFile file("mismatch");
  CHECK(refusal("/nonexistent/file").find("cannot be opened") != std::string::npos);
  write_all(file.path, std::vector<char>(1000, 'x'));
  CHECK(refusal(file.path).find("not a chunk file") != std::string::npos);
  save_some(file.path, random_prompts(random, 3));
  CHECK(refusal(file.path, "another").find("made for model \"m\"") != std::string::npos);
  CHECK(refusal<half>(file.path).find("element type, expected half") != std::string::npos);
  for (int field = 0; field < 3; ++field) {
    KvCacheOptions other = geometry;
    (field == 0 ? other.num_layers : field == 1 ? other.num_kv_heads : other.head_dim) *= 2;
    CHECK(refusal(file.path, "m", other).find("another geometry") != std::string::npos);
  }
  CHECK(refusal<float, 32>(file.path).empty());  // the chunk size may differ
}

TEST_CASE("a file that 0.2.1 wrote is loaded") {
  const std::string path = CHUNKATTN_SOURCE_DIR "/tests/examples/saved_by_0.2.1.chunks";
  const std::vector<std::vector<int>> prompts{{1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 2, 3, 42}};
  Tree tree(PoolAllocator{.max_chunks = 1000});
  KvCache<Cpu, float> cache(tree, geometry);
  REQUIRE(persist::load(path, tree, cache, "m") == 10);
  for (const auto& prompt : prompts) {
    const auto sequence = tree.insert(prompt, {.compute_last = false});
    REQUIRE(sequence.num_cached() == prompt.size());
    CHECK(wrong(sequence, prompt.size(), cache) == 0);
  }
}

TEST_CASE("a file that 0.3.0 wrote is loaded, and one of now has the same bytes") {
  const std::string path = CHUNKATTN_SOURCE_DIR "/tests/examples/saved_by_0.3.0.chunks";
  const Prompts prompts{
      {{1, 2, 3, 4, 5, 6, 7, 8, 9}}, {{1, 2, 3, 42}}, {{1, 2, 3, 4}, {.tenant = 5, .adapter = 2}}};
  Tree tree(PoolAllocator{.max_chunks = 1000});
  KvCache<Cpu, float> cache(tree, geometry);
  REQUIRE(persist::load(path, tree, cache, "m") == 14);
  for (const auto& [tokens, name_space] : prompts) {
    const auto sequence = tree.insert(tokens, {.name_space = name_space, .compute_last = false});
    REQUIRE(sequence.num_cached() == tokens.size());
    CHECK(wrong(sequence, tokens.size(), cache) == 0);
  }
  const TemporaryFile file("as_0.3.0");
  CHECK(save_some(file.path, prompts) == 14);
  CHECK(read_all(file.path) == read_all(path));
}

TEST_CASE("other versions of the format, and of the layout of K/V, are refused by their numbers") {
  const TemporaryFile file("version");
  Random random(5);
  save_some(file.path, random_prompts(random, 3));
  const std::vector<char> good = read_all(file.path);
  const auto refusal_with = [&](std::size_t offset, std::uint32_t value) {
    auto bytes = good;
    std::memcpy(&bytes[offset], &value, sizeof(value));
    const std::size_t body = bytes.size() - sizeof(std::uint64_t);
    const std::uint64_t sum =
        persist::detail::checksum(std::as_bytes(std::span(bytes).first(body)));
    std::memcpy(&bytes[body], &sum, sizeof(sum));
    write_all(file.path, bytes);
    const std::string message = refusal(file.path);
    return message.substr(std::min(message.size(), file.path.size() + 2));
  };
  using Header = persist::detail::Header;
  CHECK(refusal_with(offsetof(Header, version), 2) == "");
  CHECK(refusal_with(offsetof(Header, version), 1) ==
        "of format version 1 where this program reads 2: save it again");
  CHECK(refusal_with(offsetof(Header, version), 3) ==
        "of format version 3 where this program reads 2");
  CHECK(refusal_with(offsetof(Header, layout), kv_layout_version + 1) ==
        "K/V in layout 2, expected 1");
}
