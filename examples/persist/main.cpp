// Fills a prefix cache, saves it, loads it into a fresh one and shows that nothing has to be
// computed again; then shows which files are refused.
#include <fmt/format.h>

#include <cerrno>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/transfer/transfer.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "../support/options.hpp"
#include "../support/output_file.hpp"
#include "chunk_file.hpp"

namespace {

using Token = std::uint32_t;
using Tree = chunkattn::PrefixTree<Token, 64>;
using Cache = chunkattn::KvCache<chunkattn::Cpu, chunkattn::half>;
constexpr chunkattn::KvCacheOptions geometry{.num_layers = 4, .num_kv_heads = 2, .head_dim = 64};

/// Stands in for a model, or for whatever else brings K/V that no step of ours computes: K/V that
/// depends on token and position is written to the sequence's slots, then it says so.
void prefill(Tree::Sequence& sequence, Cache& cache) {
  const chunkattn::TokenRange range = sequence.loadable();
  const std::vector<Token> tokens = sequence.tokens();
  chunkattn::for_each_kv_span(sequence, range, cache, [&](const auto& span) {
    for (int t = 0; t < span.length; ++t)
      for (int i = 0; i < geometry.head_dim; ++i) {
        const auto token = tokens[static_cast<std::size_t>(span.position + t)];
        const float x = static_cast<float>((token * 31 + static_cast<Token>(i)) % 97) - 48;
        span.k[t * span.stride_token + i] = chunkattn::to_half(x);
        span.v[t * span.stride_token + i] = chunkattn::to_half(-x);
      }
  });
  sequence.mark_loaded(range);
}

std::vector<persist::CachedPrompt<Token>> make_prompts() {
  std::vector<persist::CachedPrompt<Token>> prompts;
  for (Token user = 0; user < 8; ++user) {  // a system prompt of 500 tokens, then 100 of each user
    persist::CachedPrompt<Token> prompt;
    for (Token i = 0; i < 600; ++i) prompt.tokens.push_back(i < 500 ? i : 1000 * (user + 1) + i);
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

std::vector<char> read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_all(const std::string& path, const std::vector<char>& bytes) {
  examples::OutputFile file(path);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

/// A folder of this run's own, gone in the end with all that is in it.
class ScratchFolder {
 public:
  ScratchFolder() : path_((std::filesystem::temp_directory_path() / "chunkattn-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr)
      throw examples::OutputError(path_,
                                  "cannot be made: " + std::generic_category().message(errno));
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

void try_to_load(const char* what, const std::string& path, const std::string& tag) {
  Tree tree(chunkattn::PoolAllocator{.max_chunks = 1000});
  Cache cache(tree, geometry);
  try {
    persist::load(path, tree, cache, tag);
    fmt::print("  {:<16} loaded\n", what);
  } catch (const persist::FileError& error) {
    const std::string text = error.what();
    fmt::print(
        "  {:<16} refused: {}\n", what,
        examples::wrapped(fmt::format("{}; {} chunks in use", text.substr(text.find(": ") + 2),
                                      tree.stats().used_chunks),
                          28));
  }
}

int run(int argc, char** argv) {
  std::string path;
  examples::Options options("persist", "saves a prefix cache to a file and loads it again");
  options.text("--file", "PATH", "where to save (kept afterwards when given)", path);
  if (!options.parse(argc, argv)) return 0;
  const ScratchFolder scratch;
  if (path.empty()) path = scratch.file("chunks");

  const auto prompts = make_prompts();
  {
    Tree tree(chunkattn::PoolAllocator{.max_chunks = 1000});
    Cache cache(tree, geometry);
    for (const auto& prompt : prompts) {
      auto sequence = tree.insert(prompt.tokens);
      prefill(sequence, cache);
    }  // leaves: its chunks stay as cache
    const std::size_t saved = persist::save(path, tree, cache, "toy-1",
                                            std::span<const persist::CachedPrompt<Token>>(prompts));
    fmt::print("{} prompts of 600 tokens share 500: saved the K/V of {} tokens, {:.1f} MiB\n",
               prompts.size(), saved,
               static_cast<double>(std::filesystem::file_size(path)) / (1 << 20));
  }
  {
    Tree tree(chunkattn::PoolAllocator{.max_chunks = 1000});
    Cache cache(tree, geometry);
    const std::size_t loaded = persist::load(path, tree, cache, "toy-1");
    std::size_t hits = 0, tokens = 0;
    for (const auto& prompt : prompts) {
      hits += tree.match_prefix(prompt.tokens).cached;
      tokens += prompt.tokens.size();
    }
    fmt::print("a fresh cache loaded {} tokens; {} of {} prompt tokens are hits\n\n", loaded, hits,
               tokens);
  }
  const std::vector<char> good = read_all(path);
  const std::string bad = scratch.file("bad");
  try_to_load("the file itself", path, "toy-1");
  try_to_load("another model", path, "toy-2");
  auto bytes = good;
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_all(bad, bytes);
  try_to_load("one bit flipped", bad, "toy-1");
  bytes = good;
  bytes.resize(bytes.size() - 100);
  write_all(bad, bytes);
  try_to_load("cut short", bad, "toy-1");
  write_all(bad, std::vector<char>(4096, 'x'));
  try_to_load("something else", bad, "toy-1");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return examples::guarded("persist", [&] { return run(argc, argv); });
}
