// Decode steps of one version of the library, as a shared object of its own: ./dev compare loads
// two of these into a process, each version's own.
#include "steps.hpp"

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace {

using namespace chunkattn;

template <class T>
class Steps final : public compare::Steps {
  using Tree = PrefixTree<int, 64>;

 public:
  Steps(const compare::Case& c, const compare::Memory& memory, compare::Threads& threads)
      : q_(memory.q, compare::q_size(c)),
        q_bf16_(static_cast<const bfloat16*>(memory.q_bf16), q_.size()),
        out_(memory.out, q_.size()),
        has_bf16_queries_(c.type == compare::Type::bf16_queries),
        attention_(threads, options_of(c)) {
    for (int s = 0; s < c.sequences; ++s) {
      std::vector<int> prompt;
      for (int i = 0; i < c.shared; ++i) prompt.push_back(i);
      for (int i = 0; i < c.own; ++i) prompt.push_back((s + 1) * 1000000 + i);
      sequences_.push_back(tree_.insert(prompt));
    }
    if (!c.prefill) {
      auto prompts = tree_.begin_step();
      for (auto& sequence : sequences_) (void)prompts.add(sequence, std::size_t{1} << 30);
      (void)plan_.build(prompts);
      auto done = std::move(prompts).finish();
      for (const auto& row : done.rows()) done.commit(row, 7);
    }
    step_.emplace(tree_.begin_step());
    for (auto& sequence : sequences_) (void)step_->add(sequence, std::size_t{1} << 30);
    view_ = plan_.build(*step_);
    const KvGeometry geometry{static_cast<int>(tree_.allocator().high_water()), c.kv_heads, 64,
                              compare::head_dim};
    const std::size_t size = static_cast<std::size_t>(geometry.num_chunks) * 64 *
                             static_cast<std::size_t>(c.kv_heads) * compare::head_dim;
    for (std::size_t at = 0; at == 0 || (at + size) * sizeof(T) <= memory.bytes; at += size) {
      T* const k = static_cast<T*>(memory.k) + at;
      T* const v = static_cast<T*>(memory.v) + at;
      if constexpr (has_row_scales<T>)
        layers_.push_back(make_kv_view(k, v, memory.k_scale, memory.v_scale, geometry));
      else
        layers_.push_back(make_kv_view(k, v, geometry));
    }
  }
  void run(int number) override {
    const KvView<T>& layer = layers_[static_cast<std::size_t>(number) % layers_.size()];
    if (has_bf16_queries_)
      attention_.run(layer, view_, q_bf16_, out_);
    else
      attention_.run(layer, view_, q_, out_);
  }

 private:
  static CpuOptions options_of(const compare::Case& c) {
    CpuOptions options;
    if (c.type == compare::Type::bf16_one_term) options.accuracy = CpuOptions::Accuracy::one_term;
    return options;
  }

  std::span<const float> q_;
  std::span<const bfloat16> q_bf16_;
  std::span<float> out_;
  bool has_bf16_queries_;
  Tree tree_;
  AttentionPlan plan_;
  std::vector<Tree::Sequence> sequences_;
  std::optional<Tree::Step> step_;
  ChunkAttention<Cpu, compare::head_dim, compare::head_dim, compare::Threads> attention_;
  Tree::StepView view_;
  std::vector<KvView<T>> layers_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) compare::Steps* make_steps(
    const compare::Case& c, const compare::Memory& memory, compare::Threads& threads) {
  switch (c.type) {
    case compare::Type::bf16:
    case compare::Type::bf16_one_term:
    case compare::Type::bf16_queries:
      return new Steps<bfloat16>(c, memory, threads);
    case compare::Type::int8:
      return new Steps<std::int8_t>(c, memory, threads);
    default:
      return new Steps<float>(c, memory, threads);
  }
}
