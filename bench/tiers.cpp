// Rates of tiers: what a call of a store takes, and what a prompt of which all is in a tier takes
// until its K/V is loaded; so from which rate on computing is faster.
//
//   tiers_bench [DIRECTORY]     by default under the directory for temporary files
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/tiers/tiers.hpp>
#include <chunkattn/transfer/transfer.hpp>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bench/median.hpp"

namespace {

using namespace chunkattn;
using Tree = PrefixTree<int, 64>;
using Cache = KvCache<Cpu, half>;
using Clock = std::chrono::steady_clock;

// Of Llama 3.2 1B: 32 KiB of K/V for each token, 2 MiB for a block of 64.
constexpr KvCacheOptions shape{.num_layers = 16, .num_kv_heads = 8, .head_dim = 64};
constexpr std::size_t num_blocks = 64, block_bytes = std::size_t{2} << 20;
constexpr int rounds = 7;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Files are not in memory any more, as far as the system does what it is asked for.
void forget_files(const std::string& folder) {
  ::sync();
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    (void)::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

/// MB/s of put() and get() of records of one block, one after the other.
void measure_store(const char* name, TierStore& store, const std::function<void()>& before_gets) {
  std::vector<double> puts, gets;
  for (int round = 0; round < rounds; ++round) {
    std::vector<TierStore::Record> records;
    for (std::size_t i = 0; i < num_blocks; ++i)
      records.push_back(std::make_shared<const std::vector<std::byte>>(
          block_bytes, static_cast<std::byte>(i + static_cast<std::size_t>(round))));
    auto start = Clock::now();
    for (std::size_t i = 0; i < num_blocks; ++i) (void)store.put({i, 1}, records[i], {});
    puts.push_back(seconds_since(start));
    records.clear();
    before_gets();
    start = Clock::now();
    std::size_t sum = 0;  // a record that is found is read
    for (std::size_t i = 0; i < num_blocks; ++i) {
      const TierStore::Record record = store.get({i, 1}, {});
      for (std::size_t at = 0; at < record->size(); at += 64)
        sum += static_cast<std::size_t>((*record)[at]);
    }
    gets.push_back(seconds_since(start));
    if (sum == 1) fmt::print("\n");
  }
  const double megabytes = 1e-6 * static_cast<double>(num_blocks * block_bytes);
  fmt::print("| {} | {:.0f} | {:.0f} |\n", name, megabytes / bench::median(puts),
             megabytes / bench::median(gets));
}

/// A prompt whose K/V is all in a tier, from load() until the last block is loaded.
void measure_load(const char* name, std::shared_ptr<TierStore> store,
                  std::optional<ElementType> stored_as, const std::function<void()>& before) {
  Tree tree(PoolAllocator{.max_chunks = 4 * num_blocks});
  Cache cache(tree, shape);
  Tiers<Tree, Cache> tiers(tree, cache, {std::move(store)},
                           {.model = "bench", .stored_as = stored_as});
  std::vector<int> prompt(64 * num_blocks);
  std::iota(prompt.begin(), prompt.end(), 0);
  {
    auto sequence = tree.insert(prompt, {.compute_last = false});
    for_each_kv_span(sequence, sequence.loadable(), cache, [](const KvSpan<half>& span) {
      for (int t = 0; t < span.length; ++t)
        for (int i = 0; i < shape.head_dim; ++i)
          span.k[t * span.stride_token + i] = span.v[t * span.stride_token + i] =
              to_half(static_cast<float>(i + t) * 0.01f);
    });
    sequence.mark_loaded(sequence.loadable());
  }
  std::vector<double> downs, ups;
  for (int round = 0; round < rounds; ++round) {
    auto start = Clock::now();
    {
      const auto all = tree.insert(std::vector<int>(64 * 4 * num_blocks, -1));  // evicts the prompt
    }
    downs.push_back(seconds_since(start));
    tiers.flush();
    before();
    auto sequence = tree.insert(prompt, {.compute_last = false});
    start = Clock::now();
    auto load = tiers.load(sequence, /*compute_last=*/false);
    load.wait(sequence);
    ups.push_back(seconds_since(start));
    if (sequence.num_written() != prompt.size()) fmt::print("not all came back\n");
  }
  const double tokens = static_cast<double>(prompt.size());
  const double megabytes = 1e-6 * static_cast<double>(num_blocks * block_bytes);
  fmt::print("| {} | {:.0f} | {:.0f} | {:.0f} |\n", name, megabytes / downs.front(),
             megabytes / bench::median(ups), tokens / bench::median(ups));
}

}  // namespace

int main(int argc, char** argv) {
  const std::filesystem::path parent =
      argc > 1 ? std::filesystem::path(argv[1]) : std::filesystem::temp_directory_path();
  const std::string folder = (parent / ("tiers_bench." + std::to_string(::getpid()))).string();
  constexpr std::size_t room = std::size_t{1} << 30;
  const auto nothing = [] {};
  const auto forget = [&] { forget_files(folder); };
  fmt::print("| store | put MB/s | get MB/s |\n| --- | ---: | ---: |\n");
  MemoryTier memory(room);
  measure_store("MemoryTier", memory, nothing);
  {
    FileTier files(folder, room);
    measure_store("FileTier, in the page cache", files, nothing);
    measure_store("FileTier, not in memory", files, forget);
  }
  std::filesystem::remove_all(folder);
  fmt::print(
      "\n| tier | out of the cache, MB/s | up, MB/s | tokens/s |\n| --- | ---: | ---: | ---: |\n");
  measure_load("MemoryTier", std::make_shared<MemoryTier>(room), {}, nothing);
  measure_load("MemoryTier, int8", std::make_shared<MemoryTier>(room), ElementType::int8, nothing);
  measure_load("FileTier, in the page cache", std::make_shared<FileTier>(folder, room), {},
               nothing);
  std::filesystem::remove_all(folder);
  measure_load("FileTier, not in memory", std::make_shared<FileTier>(folder, room), {}, forget);
  std::filesystem::remove_all(folder);
  measure_load("FileTier, int8, not in memory", std::make_shared<FileTier>(folder, room),
               ElementType::int8, forget);
  std::filesystem::remove_all(folder);
  return 0;
}
