// Records as files: bounded, shared by processes, whole or not there, which process is killed when;
// and after a restart a chat continues where it was.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/other_process.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_folder.hpp"

using namespace chunkattn;
using test::iota;
using test::tier_folder::bytes_of;
using test::tier_folder::Folder;
using test::tier_folder::key_of;
using test::tier_folder::never;

namespace {

constexpr int chunk = 8;
using Tree = PrefixTree<int, chunk>;
using Cache = KvCache<Cpu, float>;
using TreeTiers = Tiers<Tree, Cache>;
constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 1, .head_dim = 8};

/// A server's life over a directory: it answers a turn and ends. Returns the tokens that came from
/// the directory.
std::size_t serve_turn(const std::string& path, const std::vector<int>& chat, float model = 1,
                       const std::string& name = "m", bool write_through = false) {
  Tree tree(PoolAllocator{.max_chunks = 64});
  Cache cache(tree, geometry);
  TreeTiers tiers(tree, cache, {std::make_shared<FileTier>(path, 1 << 20)},
                  {.model = name, .write_through = write_through});
  std::size_t found = 0;
  {
    auto s = tree.insert(chat);
    auto loading = tiers.load(s);
    loading.wait(s);
    found = s.num_written();
    const auto each = [&](TokenRange range, const auto& f) {
      for_each_kv_span(s, range, cache, [&](const KvSpan<float>& span) {
        for (int t = 0; t < span.length; ++t)
          for (int i = 0; i < 8; ++i)
            f(span.k[t * span.stride_token + i],
              model * static_cast<float>(s.token(static_cast<std::size_t>(span.position + t)) * 8 +
                                         i + span.layer));
      });
    };
    each({0, static_cast<std::int32_t>(found)}, [](float& x, float is) { CHECK(x == is); });
    const TokenRange rest = s.loadable();
    each(rest, [](float& x, float is) { x = is; });
    s.mark_loaded(rest);
  }
  if (write_through)
    (void)tiers.advance(1000);
  else
    tiers.store_all();
  tiers.flush();
  return found;
}

}  // namespace

TEST_CASE("after a restart the second turn of a chat hits") {
  for (const bool through : {false, true}) {
    const Folder folder;
    CHECK(serve_turn(folder.path, iota(0, 100), 1, "m", through) == 0);
    CHECK(folder.files() == 12);
    CHECK(serve_turn(folder.path, iota(0, 140), 1, "m", through) == 96);
    CHECK(serve_turn(folder.path, iota(0, 140), 1, "m", through) == 136);
    CHECK(serve_turn(folder.path, iota(0, 140), 2, "other weights", through) == 0);
    CHECK(folder.files() == 2 * 17);
  }
}

TEST_CASE("files that were damaged are computed again, and replaced") {
  test::Random random;
  for (int kind = 0; kind < 6; ++kind) {
    const Folder folder;
    CHECK(serve_turn(folder.path, iota(0, 64)) == 0);
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      if (entry.path().extension() == ".kv") files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    REQUIRE(files.size() == 8);
    const auto& victim = files[random.index(8)];
    const auto size = std::filesystem::file_size(victim);
    switch (kind) {
      case 0:
        std::filesystem::resize_file(victim, size - 1 - random.index(size - 1));
        break;
      case 1:
        std::filesystem::resize_file(victim, 0);
        break;
      case 2:
        std::filesystem::resize_file(victim, size + 7);
        break;
      case 3: {
        std::fstream file(victim, std::ios::in | std::ios::out | std::ios::binary);
        const auto at = static_cast<std::streamoff>(random.index(size));
        file.seekg(at);
        const int byte = file.get();
        file.seekp(at);
        file.put(static_cast<char>(byte ^ 16));
        break;
      }
      case 4:  // all are each other's
        for (std::size_t i = 0; i + 1 < files.size(); ++i) {
          std::filesystem::rename(files[i], folder.path + "/swap");
          std::filesystem::rename(files[i + 1], files[i]);
          std::filesystem::rename(folder.path + "/swap", files[i + 1]);
        }
        break;
      default:
        std::filesystem::remove(victim);
        std::filesystem::create_directory(victim);
    }
    const std::size_t found = serve_turn(folder.path, iota(0, 64));
    CHECK(found < 63);
    CHECK(found % chunk == 0);
    if (kind < 4) CHECK(serve_turn(folder.path, iota(0, 64)) == 63);
  }
}

TEST_CASE("a directory is bounded, and keeps what was read last") {
  const Folder folder;
  FileTier files(folder.path, 100000);
  for (std::uint64_t n = 1; n <= 500; ++n) {
    CHECK(files.put(key_of(n), bytes_of(n, 1000 + n), never));
    CHECK(files.put(key_of(1), bytes_of(1, 1001), never));  // again: counted once
    CHECK(files.num_bytes() <= 100000);
    std::uintmax_t size = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      if (entry.path().extension() == ".kv") size += entry.file_size();
    CHECK(size == files.num_bytes());
    const auto first = files.get(key_of(1), never);
    REQUIRE(first);
    CHECK(*first == *bytes_of(1, 1001));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  CHECK(files.contains(key_of(500)));
  CHECK_FALSE(files.contains(key_of(2)));
  files.erase(key_of(500));
  CHECK_FALSE(files.contains(key_of(500)));
  CHECK_FALSE(files.get(key_of(500), never));
  CHECK_FALSE(files.put(key_of(7), bytes_of(7, 100001), never));
  const std::atomic<bool> cancelled = true;
  CHECK_FALSE(files.put(key_of(8), bytes_of(8, 10), cancelled));
  CHECK_FALSE(files.get(key_of(1), cancelled));
  CHECK(folder.files(".part-") == 0);
}

#if !defined(_WIN32)
TEST_CASE("a directory that cannot be written any more costs only what it does not keep") {
  if (::geteuid() == 0) {
    MESSAGE("skipped: root may write anything");
    return;
  }
  const Folder folder;
  FileTier files(folder.path, 100000);
  CHECK(files.put(key_of(1), bytes_of(1, 100), never));
  REQUIRE(::chmod(folder.path.c_str(), 0500) == 0);
  CHECK_FALSE(files.put(key_of(2), bytes_of(2, 100), never));
  CHECK(files.get(key_of(1), never));
  REQUIRE(::chmod(folder.path.c_str(), 0700) == 0);
  CHECK(files.put(key_of(2), bytes_of(2, 100), never));
}

#endif

namespace {

constexpr std::uint64_t limit = 300000, keys = 60;

/// Puts one record after the other until it is killed, or forgotten.
void put_on_and_on(const std::string& path, std::uint64_t first) {
  FileTier own(path, limit);
  std::ofstream(path + "/works-" + std::to_string(first));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (std::uint64_t n = first; std::chrono::steady_clock::now() < end; ++n)
    (void)own.put(key_of(n % keys), bytes_of(n % keys, 10000), never);
}

}  // namespace

TEST_CASE("another-process-puts" * doctest::skip()) {
  test::in_other_process(put_on_and_on);
}

TEST_CASE("processes share a directory; those that are killed leave nothing half") {
  test::Random random;
  const Folder folder;
  FileTier files(folder.path, limit);
  for (int round = 0; round < 10; ++round) {
    std::vector<test::OtherProcess> others;
    for (int i = 0; i < 3; ++i)
      others.emplace_back("another-process-puts", put_on_and_on, folder.path,
                          static_cast<std::uint64_t>(round * 7 + i));
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (folder.files("works-") < 3 * static_cast<std::size_t>(round + 1)) {
      REQUIRE(std::chrono::steady_clock::now() < late);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::milliseconds(30 + random.index(40));
    for (std::uint64_t n = 0; std::chrono::steady_clock::now() < end; ++n)
      if (const auto found = files.get(key_of(n % keys), never))
        REQUIRE(*found == *bytes_of(n % keys, 10000));
    for (test::OtherProcess& other : others) other.kill();
    CHECK(folder.files() > 0);
    std::uintmax_t size = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      if (entry.path().extension() == ".kv") {
        size += entry.file_size();
        CHECK(entry.file_size() == 10000);
      }
    CHECK(size <= limit);
  }
  FileTier next(folder.path, limit);
  CHECK(folder.files(".part-") == 0);
  CHECK(next.num_bytes() == 10000 * folder.files());
  for (std::uint64_t n = 0; n < keys; ++n)
    if (const auto found = next.get(key_of(n), never)) CHECK(*found == *bytes_of(n, 10000));
}
