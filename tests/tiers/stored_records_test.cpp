// Records that version 0.3.0 stored: they are found and loaded, and records of now have the same
// bytes. `store()` wrote stored_by_0.3.0/, with the headers of that version.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/detail/record.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/tier_folder.hpp"

using namespace chunkattn;
using test::tier_folder::Folder;

namespace {

using Tree = PrefixTree<int, 8>;
const std::string stored_by_0_3_0 = CHUNKATTN_SOURCE_DIR "/tests/tiers/stored_by_0.3.0";
// Three blocks of 4 tokens, two of them public.
const InsertOptions how{.name_space = {.tenant = 7}, .public_length = 9};

std::vector<int> prompt() {
  std::vector<int> tokens(12);
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

/// A tree over a directory.
template <class T>
struct Setup {
  using TreeTiers = Tiers<Tree, KvCache<Cpu, T>>;

  Setup(const std::string& folder, std::optional<ElementType> stored_as)
      : tiers(tree, cache, {std::make_shared<FileTier>(folder, 1 << 20)},
              {.model = "m", .block_tokens = 4, .stored_as = stored_as, .threads = false}) {}

  /// Calls f(element, what it is to be) for K and V of what is there.
  template <class F>
  void each(const Tree::Sequence& s, TokenRange range, const F& f) {
    for_each_kv_span(s, range, cache, [&](const KvSpan<T>& span) {
      for (int t = 0; t < span.length; ++t)
        for (int i = 0; i < 8; ++i) {
          const float x = static_cast<float>((span.position + t) * 8 + i - 48) / 16;
          f(span.k[t * span.stride_token + i], x);
          f(span.v[t * span.v_stride_token + i], 1 - x);
        }
    });
  }
  void store() {
    auto s = tree.insert(prompt(), how);
    each(s, s.loadable(), [](T& element, float x) { element = from_float<T>(x); });
    s.mark_loaded(s.loadable());
    s.leave();
    tiers.store_all();
    tiers.flush();
  }

  Tree tree{PoolAllocator{.max_chunks = 8}};
  KvCache<Cpu, T> cache{tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8}};
  TreeTiers tiers;
};

/// Calls f(a setup over the folder, how far K/V may be off) for each form in which K/V is stored.
template <class F>
void for_each_form(const std::string& folder, const F& f) {
  f(Setup<float>(folder, {}), 0.0);
  f(Setup<half>(folder, ElementType::int8), 0.02);
  f(Setup<half>(folder, ElementType::float8_e4m3), 0.2);
}

/// The files of a directory that have records' names.
std::map<std::string, std::string> records(const std::string& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".kv") continue;
    std::ifstream in(entry.path(), std::ios::binary);
    all[entry.path().filename().string()] = {std::istreambuf_iterator<char>(in), {}};
  }
  return all;
}

}  // namespace

TEST_CASE("records that 0.3.0 stored are loaded") {
  if (std::endian::native != std::endian::little) return;
  const Folder folder;  // a tier notes which records were used
  std::filesystem::copy(stored_by_0_3_0, folder.path);
  REQUIRE(records(folder.path).size() == 9);
  for_each_form(folder.path, [](auto&& setup, double tolerance) {
    CAPTURE(tolerance);
    auto s = setup.tree.insert(prompt(), how);
    setup.tiers.load(s, /*compute_last=*/false).wait(s);
    REQUIRE(s.num_written() == 12);
    double off = 0;
    setup.each(s, {0, 12}, [&](const auto& element, float x) {
      off = std::fmax(off, std::fabs(to_float(element) - x));
    });
    CHECK(off <= tolerance);
    CHECK((off > 0) == (tolerance > 0));
    CHECK(setup.tiers.stats().tiers[0].refused == 0);
  });
  CHECK(records(folder.path) == records(stored_by_0_3_0));
}

TEST_CASE("records of now have the names and the bytes of 0.3.0") {
  if (std::endian::native != std::endian::little) return;
  const Folder folder;
  for_each_form(folder.path, [](auto&& setup, double) { setup.store(); });
  CHECK(records(folder.path) == records(stored_by_0_3_0));
}

TEST_CASE("each number of a shape has its place in a name, which 0.3.0 gave as well") {
  if (std::endian::native != std::endian::little) return;
  Tree tree(PoolAllocator{.max_chunks = 8});
  KvCache<Cpu, float> cache(tree,
                            {.num_layers = 2, .num_kv_heads = 3, .head_dim = 16, .value_dim = 8});
  const Folder folder;
  Tiers<Tree, KvCache<Cpu, float>> tiers(tree, cache,
                                         {std::make_shared<FileTier>(folder.path, 1 << 20)},
                                         {.model = "m", .block_tokens = 4, .threads = false});
  {
    auto s = tree.insert(prompt(), how);
    for_each_kv_span(s, s.loadable(), cache, [](const KvSpan<float>& span) {
      for (int t = 0; t < span.length; ++t) {
        std::fill_n(span.k + t * span.stride_token, 16, 0.0f);
        std::fill_n(span.v + t * span.v_stride_token, 8, 0.0f);
      }
    });
    s.mark_loaded(s.loadable());
  }
  tiers.store_all();
  tiers.flush();
  std::vector<std::string> names;
  for (const auto& [name, bytes] : records(folder.path)) names.push_back(name);
  CHECK(names == std::vector<std::string>{"5a55cf249aa064df523202840ab258ba.kv",
                                          "c14971c470f82616d900fcf504ff7125.kv",
                                          "ec768155093301c7ea686e5b55341010.kv"});
}

TEST_CASE("rows of K and of V lie one after the other, layer by layer, each as long as it is") {
  struct Row {
    std::size_t row, dim, at;
    bool operator==(const Row&) const = default;
  };
  const detail::TierCodec codec{.layers = 2, .rows = 2, .k_dim = 16, .v_dim = 8};
  std::vector<Row> rows;
  CHECK(detail::for_each_tier_row(codec, [&](std::size_t row, std::size_t dim, std::size_t at) {
    rows.push_back({row, dim, at});
    return true;
  }));
  CHECK(rows == std::vector<Row>{{0, 16, 0},
                                 {1, 16, 16},
                                 {2, 8, 32},
                                 {3, 8, 40},
                                 {4, 16, 48},
                                 {5, 16, 64},
                                 {6, 8, 80},
                                 {7, 8, 88}});
}

TEST_CASE("all of a checksum counts") {
  if (std::endian::native != std::endian::little) return;
  for (const int at : {32, 47}) {  // its first byte, and its last
    const Folder folder;
    std::filesystem::copy(stored_by_0_3_0, folder.path);
    for (const auto& [name, bytes] : records(folder.path)) {
      std::fstream file(folder.path + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(at);
      file.put(static_cast<char>(bytes[static_cast<std::size_t>(at)] ^ 1));
    }
    for_each_form(folder.path, [](auto&& setup, double) {
      auto s = setup.tree.insert(prompt(), how);
      setup.tiers.load(s).wait(s);
      CHECK(s.num_written() == 0);
      CHECK(setup.tiers.stats().tiers[0].refused == 1);
    });
  }
}

TEST_CASE("a record of another format is not read, and is counted") {
  if (std::endian::native != std::endian::little) return;
  const Folder folder;
  std::filesystem::copy(stored_by_0_3_0, folder.path);
  for (const auto& [name, bytes] : records(folder.path)) {
    std::fstream file(folder.path + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    REQUIRE(bytes.substr(0, 8) == "CKTIER01");
    file.seekp(7);
    file.put('2');
  }
  for_each_form(folder.path, [](auto&& setup, double) {
    auto s = setup.tree.insert(prompt(), how);
    setup.tiers.load(s).wait(s);
    CHECK(s.num_written() == 0);
    CHECK(setup.tiers.stats().tiers[0].refused == 1);
    CHECK(setup.tiers.stats().tiers[0].missed == 0);
  });
}
