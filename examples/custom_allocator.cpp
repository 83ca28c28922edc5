// Your allocator: a large model and the small one that drafts for it take the chunks of their trees
// from one pool of blocks, each up to a share of its own.
#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace chunkattn;
constexpr std::size_t num_blocks = 10;

// What a tree needs of the engine's block manager: the concept ChunkAllocator.
struct Blocks {
  std::vector<ChunkIndex>* pool;  // free blocks
  std::size_t share, used = 0;

  ChunkIndex allocate() {
    if (available() == 0) return no_chunk;
    const ChunkIndex block = pool->back();
    pool->pop_back();
    ++used;
    return block;
  }
  void free(ChunkIndex block) noexcept {
    pool->push_back(block);  // has been as long before, so nothing is allocated
    --used;
  }
  std::size_t capacity() const noexcept { return share; }
  std::size_t available() const noexcept { return std::min(share - used, pool->size()); }
  std::size_t high_water() const noexcept { return num_blocks; }  // K/V memory covers all of them
};
static_assert(ChunkAllocator<Blocks>);
using Tree = PrefixTree<int, 16, Blocks>;

int main() {
  std::vector<ChunkIndex> pool(num_blocks);
  std::iota(pool.rbegin(), pool.rend(), 0);
  Tree large(Blocks{&pool, 8}), small(Blocks{&pool, 6});
  const std::vector<int> prompt(90, 7);

  auto chat = large.insert(prompt);
  std::printf("large: %zu tokens in blocks", chat.size());
  chat.for_each_run({0, 90}, [](const Piece& piece) { std::printf(" %d", piece.chunk); });

  const bool waits = !small.try_insert(prompt);  // nothing has changed: try again later
  std::printf("\nsmall: %zu blocks needed, %zu available\n", small.chunks_needed(prompt),
              small.chunks_available());
  chat.leave();
  auto draft = small.insert(prompt);
  std::printf("small: %zu tokens in blocks", draft.size());
  draft.for_each_run({0, 90}, [](const Piece& piece) { std::printf(" %d", piece.chunk); });

  const bool counted =
      large.stats().used_chunks + small.stats().used_chunks + pool.size() == num_blocks;
  draft.leave();
  std::printf("\n%zu of %zu blocks are back\n", pool.size(), num_blocks);
  return waits && counted && pool.size() == num_blocks ? 0 : 1;
}
