// A unit written for chunkattn 0.2, of names that 0.3 has changed and tools/migrate_0.3.sh has
// rules for. It compiles with 0.2.1 as it is, and with 0.3 after the script.
#include <chunkattn/attention/accuracy.hpp>
#include <chunkattn/attention/lanes.hpp>
#include <chunkattn/attention/merge_state.hpp>
#include <chunkattn/attention/options.hpp>
#include <chunkattn/attention/reference.hpp>
#include <chunkattn/attention/variant.hpp>
#include <chunkattn/base/device.hpp>
#include <chunkattn/base/element.hpp>
#include <chunkattn/base/element_type.hpp>
#include <chunkattn/base/error.hpp>
#include <chunkattn/base/executor.hpp>
#include <chunkattn/base/slot.hpp>
#include <chunkattn/base/version.hpp>
#include <chunkattn/chunk_attention.hpp>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/cpu/chunk_attention.hpp>
#include <chunkattn/front/any_attention.hpp>
#include <chunkattn/front/any_kv.hpp>
#include <chunkattn/front/any_variant.hpp>
#include <chunkattn/front/make_attention.hpp>
#include <chunkattn/kv/cache.hpp>
#include <chunkattn/kv/quantized.hpp>
#include <chunkattn/kv/transfer.hpp>
#include <chunkattn/kv/view.hpp>
#include <chunkattn/plan/arrays.hpp>
#include <chunkattn/plan/attention_plan.hpp>
#include <chunkattn/plan/block_table.hpp>
#include <chunkattn/plan/view.hpp>
#include <chunkattn/tree/add_result.hpp>
#include <chunkattn/tree/allocator.hpp>
#include <chunkattn/tree/nodes.hpp>
#include <chunkattn/tree/prefix_tree.hpp>
#include <chunkattn/tree/print.hpp>
#include <chunkattn/tree/retention.hpp>
#include <chunkattn/tree/sequence.hpp>
#include <chunkattn/tree/step.hpp>
#include <chunkattn/tree/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

using namespace chunkattn;

using Tree = PrefixTree<int, 16>;
using Short = ChunkAttention<Cpu, 64, ThreadPool>;
using Latent = ChunkAttention<Cpu, 576, ThreadPool, 512>;
using Serial = ChunkAttention<Cpu, 64, SerialExecutor>;
using Narrow = chunkattn::ChunkAttention<chunkattn::Cpu, 192, chunkattn::SerialExecutor, 128>;

struct Lowest {
  std::size_t most = max_slots;
  SlotIndex next = 0;
  SlotIndex allocate() { return next < 100 ? next++ : no_slot; }
  void free(SlotIndex) noexcept {}
  [[nodiscard]] std::size_t capacity() const noexcept { return 100; }
  [[nodiscard]] std::size_t available() const noexcept { return 100 - std::size_t(next); }
  [[nodiscard]] std::size_t high_water() const noexcept { return std::size_t(next); }
};
static_assert(ChunkAllocator<Lowest>);

std::size_t of_the_tree(Tree& tree, const std::vector<int>& prompt) {
  std::size_t sum = tree.num_slots();
  if (tree.slots_needed(prompt) > tree.slots_available()) return sum;
  auto sequence = tree.insert(prompt);
  const TreeStats stats = tree.stats();
  sum += stats.used_slots + stats.retained_slots + stats.evicted_slots + stats.splits_inside_slot;
  sum += sequence.weights() + sequence.slots_needed(3);
  sequence.for_each_run({0, 3}, [&](const Piece& piece) { sum += std::size_t(piece.slot); });
  for_each_node(tree, 4, [&](const NodeInfo<int>& node) { sum += std::size_t(node.length); });
  const MatchResult match = tree.match_prefix(prompt);
  sum += match.cached;
  const CacheEvent* event = nullptr;
  return event != nullptr ? std::size_t(event->first_slot) : sum;
}

template <CpuKvElement T>
std::size_t of_memory(const KvView<T>& view, const KvCache<Cpu, T>& cache) {
  std::size_t sum = std::size_t(view.num_slots + view.stride_slot + view.v_stride_slot);
  if constexpr (has_row_scales<T>) sum += std::size_t(view.scale_stride_slot);
  return sum + cache.num_slots() + cache.bytes_per_slot();
}
template std::size_t of_memory(const KvView<float>&, const KvCache<Cpu, float>&);
template std::size_t of_memory(const KvView<std::int8_t>&, const KvCache<Cpu, std::int8_t>&);

std::uint64_t of_a_plan(const PlanView& plan) {
  std::uint64_t sum = plan.topology + plan.pieces_version;
  for (int s = 0; s < plan.num_segments; ++s) sum += std::uint64_t(plan.segments[s].piece_count);
  for (int c = 0; c < plan.num_copies; ++c)
    sum += std::uint64_t(plan.copies[c].source_slot + plan.copies[c].target_slot);
  const Segment& first = plan.segments[0];
  const chunkattn::Segment* last = &first + plan.num_segments - 1;
  std::vector<RowCopy> copies(std::size_t(plan.num_copies));
  const PlanArrays arrays{.copies = {}};
  sum += std::uint64_t(last->row_end) + copies.size() + arrays.copies.size();
  const WriteTarget nowhere{.slot = no_slot, .offset = 0};
  return plan.writes[0].slot == nowhere.slot ? 0 : sum;
}

bool of_a_step(Tree& tree, std::vector<Tree::Sequence>& batch) {
  const std::vector<int> drafts{1, 2, 3};
  const std::vector<std::int32_t> parents{-1, 0, 0};
  auto step = tree.begin_step();
  const AddResult one = step.add(batch[0], 100, drafts);
  const AddResult two = step.add(batch[1], std::size_t(100), drafts, parents);
  const AddResult three = step.add(batch[2], 100, UnknownDrafts{3});
  const AddResult four = step.add(batch[3], 100, UnknownDrafts{3}, parents);
  if (one.reason() == HoldReason::waits_for_step) return false;
  const AddStatus& status = one;
  const AddAllResult all = step.add(std::span(batch));
  return bool(status) && bool(two) && bool(three) && bool(four) && all.held_index() == 0;
}

void of_states(float* out, float& lse, const float* other) {
  merge_state(out, lse, other, 0.5f, 64);
  merge_state<Base2>(out, lse, other, 0.5f, 64);
}

int of_errors(const Error& error) {
  return error.where().line;
}

void of_options(SerialExecutor& serial) {
  AttentionOptions options{.reduce = Reduce::deterministic};
  options.accuracy = chunkattn::Accuracy::one_term;
  const TreeOptions whole{.sharing = Sharing::chunk};
  Tree tree(PoolAllocator{}, whole);
  PrefixTree<int, 16, PoolAllocator, Lru> cached(PoolAllocator{}, {}, Lru{{.max_pinned = 8}});
  options.min_tasks = 8;
  options.min_product_lines = 4;
  Serial by_head(serial, {.max_task_heads = 1});
  Short pooled(1, options);
  const Rounding rounding = pooled.rounding<float>();
  static_cast<void>(rounding);
}
