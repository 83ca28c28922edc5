// Decode steps of one version of the library, as a shared object of its own: ./dev compare loads
// two of these into a process. It keeps to what earlier versions have, too.
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
  explicit Steps(const compare::Case& c, const compare::Memory& memory)
      : q_(memory.q, compare::q_size(c)),
        q_bf16_(static_cast<const bfloat16*>(memory.q_bf16), q_.size()),
        out_(memory.out, q_.size()),
        has_bf16_queries_(c.type == compare::Type::bf16_queries),
        attention_(2, options_of(c)) {
    for (int s = 0; s < c.sequences; ++s) {
      std::vector<int> prompt;
      for (int i = 0; i < c.shared; ++i) prompt.push_back(i);
      for (int i = 0; i < c.own; ++i) prompt.push_back((s + 1) * 1000000 + i);
      sequences_.push_back(tree_.insert(prompt));
    }
    {
      auto prefill = tree_.begin_step();
      for (auto& sequence : sequences_) (void)prefill.add(sequence, std::size_t{1} << 30);
      (void)plan_.build(prefill);
      auto done = std::move(prefill).finished();
      for (const auto& row : done.rows()) done.commit(row, 7);
    }
    step_.emplace(tree_.begin_step());
    for (auto& sequence : sequences_) (void)step_->add(sequence);
    view_ = plan_.build(*step_);
    const auto view_of = [&](const auto&... scales) {
      return make_kv_view(
          static_cast<T*>(memory.k), static_cast<T*>(memory.v), scales...,
          {static_cast<int>(tree_.allocator().high_water()), c.kv_heads, 64, compare::head_dim});
    };
    if constexpr (has_row_scales<T>)
      layer_ = view_of(memory.k_scale, memory.v_scale);
    else
      layer_ = view_of();
  }
  void run() override {
    if (has_bf16_queries_)
      attention_.run(layer_, view_, q_bf16_, out_);
    else
      attention_.run(layer_, view_, q_, out_);
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
  ChunkAttention<Cpu, compare::head_dim> attention_;
  Tree::StepView view_;
  KvView<T> layer_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) compare::Steps* make_steps(
    const compare::Case& c, const compare::Memory& memory) {
  switch (c.type) {
    case compare::Type::bf16:
    case compare::Type::bf16_one_term:
    case compare::Type::bf16_queries:
      return new Steps<bfloat16>(c, memory);
    case compare::Type::int8:
      return new Steps<std::int8_t>(c, memory);
    default:
      return new Steps<float>(c, memory);
  }
}
