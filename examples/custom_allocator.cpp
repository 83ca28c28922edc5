// An engine that already manages K/V blocks keeps doing so: the prefix tree asks its block manager
// for slots, and attention reads the engine's own memory through a KvView.
#include <fmt/format.h>

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "support/options.hpp"

namespace {

/// The engine's block manager. It lends blocks to the prefix cache and to others (an image encoder,
/// a draft model), never gives out block 0, and holds back a few for the others.
class BlockManager {
 public:
  explicit BlockManager(std::int32_t num_blocks, std::size_t held_back)
      : num_blocks_(num_blocks), held_back_(held_back) {
    for (std::int32_t block = num_blocks - 1; block > 0; --block) free_.push_back(block);
  }

  std::int32_t take() {
    const std::int32_t block = free_.back();
    free_.pop_back();
    return block;
  }
  void give_back(std::int32_t block) noexcept { free_.push_back(block); }

  [[nodiscard]] std::size_t num_blocks() const noexcept {
    return static_cast<std::size_t>(num_blocks_);
  }
  [[nodiscard]] std::size_t num_free() const noexcept { return free_.size(); }
  [[nodiscard]] std::size_t free_for_cache() const noexcept {
    return free_.size() > held_back_ ? free_.size() - held_back_ : 0;
  }

 private:
  std::int32_t num_blocks_;
  std::size_t held_back_;
  std::vector<std::int32_t> free_;  // capacity for all of them: give_back() never allocates
};

/// What the tree sees of it: a chunkattn::ChunkAllocator.
class BlockAllocator {
 public:
  explicit BlockAllocator(BlockManager& manager) : manager_(&manager) {}

  /// A block, or no_slot when the cache's budget is spent.
  chunkattn::SlotIndex allocate() {
    return manager_->free_for_cache() == 0 ? chunkattn::no_slot : manager_->take();
  }
  void free(chunkattn::SlotIndex slot) noexcept { manager_->give_back(slot); }
  [[nodiscard]] std::size_t capacity() const noexcept { return manager_->num_blocks() - 1; }
  [[nodiscard]] std::size_t available() const noexcept { return manager_->free_for_cache(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return manager_->num_blocks(); }

 private:
  BlockManager* manager_;
};

static_assert(chunkattn::ChunkAllocator<BlockAllocator>, "this is all that the tree needs");

constexpr int block_size = 16, num_heads = 4, head_dim = 32, num_blocks = 24;

std::vector<std::int32_t> tokens_of(std::string_view text) {  // one per character
  return {text.begin(), text.end()};
}

int run(int argc, char** argv) {
  examples::Options options("custom_allocator", "a prefix tree in the blocks of an engine");
  if (!options.parse(argc, argv)) return 0;
  BlockManager manager(num_blocks, /*held_back=*/4);
  const std::int32_t image_block = manager.take();  // somebody else uses blocks too
  fmt::print("engine: {} blocks, block {} lent to the image encoder, {} free for the cache\n",
             num_blocks, image_block, manager.free_for_cache());

  // The engine's own K and V, [block][head][token][head_dim]; the library only borrows them.
  const std::size_t elements = std::size_t{num_blocks} * num_heads * block_size * head_dim;
  std::vector<float> k_memory(elements), v_memory(elements);
  const auto kv = chunkattn::make_kv_view(k_memory.data(), v_memory.data(),
                                          {.num_slots = num_blocks,
                                           .num_kv_heads = num_heads,
                                           .chunk_size = block_size,
                                           .head_dim = head_dim});

  chunkattn::PrefixTree<std::int32_t, block_size, BlockAllocator> tree{BlockAllocator(manager)};
  chunkattn::AttentionPlan plan;
  chunkattn::ThreadPool threads(2);
  chunkattn::ChunkAttention<chunkattn::Cpu, head_dim> attention(threads);
  std::vector<float> q, k, v, out;

  // Stands in for a model of one layer: q, k and v are the same for all rows.
  const auto compute = [&](const chunkattn::LiveView& view) {
    const auto rows = static_cast<std::size_t>(view.num_rows);
    for (auto* tensor : {&q, &k, &v}) tensor->assign(rows * num_heads * head_dim, 0.25f);
    out.resize(q.size());
    attention.write(kv, view, k, v);
    attention.run(kv, view, q, out);
  };
  std::vector<decltype(tree)::Sequence> sequences;
  // Whoever has tokens to compute is in the step: a prompt when it joins, then the latest token.
  const auto run_step = [&](std::int32_t sampled) {
    auto step = tree.begin_step();
    for (auto& sequence : sequences)
      (void)step.add(sequence);  // false where no block is free: the next step tries again
    if (const auto view = plan.build(step)) compute(view);
    auto finished = std::move(step).finished();
    for (const auto& row : finished.rows()) finished.commit(row, sampled);
  };

  for (const std::string_view text : {"Translate into Welsh: where is the harbour, please?",
                                      "Translate into Welsh: where is the library, please?",
                                      "Translate into Welsh: good night."}) {
    const auto prompt = tokens_of(text);
    if (tree.slots_needed(prompt) > tree.slots_available()) break;  // admission
    sequences.push_back(tree.insert(prompt));
    fmt::print("joins:  {:2} tokens, {:2} of them cached; blocks", prompt.size(),
               sequences.back().num_cached());
    run_step('a');
    std::int32_t last = chunkattn::no_slot;
    sequences.back().for_each_run({0, static_cast<std::int32_t>(prompt.size())},
                                  [&](const chunkattn::Piece& piece) {
                                    if (piece.slot != last) fmt::print(" {}", piece.slot);
                                    last = piece.slot;
                                  });
    fmt::print("; {} free for the cache\n", manager.free_for_cache());
  }
  for (int i = 1; i < 20; ++i) run_step('a' + i);
  fmt::print("decode: 20 tokens for each of {}; {} free for the cache\n", sequences.size(),
             manager.free_for_cache());

  const auto large = tokens_of(std::string_view(
      "A prompt of its own that is far too long for the blocks that are left: the cache may not "
      "touch those which the engine holds back for others, so it has to wait for somebody to "
      "leave, and the scheduler is told so before anything has changed in the tree."));
  if (!tree.try_insert(large))
    fmt::print("waits:  {} tokens need {} blocks, the cache may take {}\n", large.size(),
               tree.slots_needed(large), tree.slots_available());

  sequences.clear();  // all of them leave
  manager.give_back(image_block);
  fmt::print("leave:  all handles are gone, {} of {} blocks are free\n", manager.num_free(),
             num_blocks - 1);
  return manager.num_free() == num_blocks - 1 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return examples::guarded("custom_allocator", [&] { return run(argc, argv); });
}
