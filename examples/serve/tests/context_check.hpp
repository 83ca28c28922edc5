// Attention over a context that lies on several ranks, against the oracle over all of it.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/debug/reference.hpp>
#include <chunkattn/detail/attention/state.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel/context_part.hpp"
#include "ranks/agreement.hpp"
#include "tests/support/random.hpp"

namespace test {

/// One rank of a context that grows: prompts of which many begin alike in parts, then tokens one by
/// one. Every rank draws the same numbers.
class ContextRank {
 public:
  static constexpr int head_dim = 16, chunk_size = 8;
  using Tree = chunkattn::PrefixTree<int, chunk_size>;

  /// \param stream  of random numbers, the same on all ranks
  ContextRank(serve::Communicator& ranks, std::uint64_t stream)
      : ranks_(ranks), random_(stream), part_(ranks) {}

  /// Throws where a result is not within what rounding explains, or not the same on all ranks.
  void run() {
    std::vector<int> common(60);
    for (int& token : common) token = random_.uniform(0, 9);
    for (int n = random_.uniform(1, 6); n > 0; --n) {
      std::vector<int> prompt(common.begin(), common.begin() + random_.uniform(0, 60));
      for (int i = random_.uniform(1, 20); i > 0; --i) prompt.push_back(random_.uniform(0, 9));
      sequences_.push_back(tree_.insert(prompt));
    }
    for (int s = random_.uniform(3, 12); s > 0; --s) step();
  }

 private:
  static constexpr int kv_heads = 2, qo_heads = 6;
  static constexpr chunkattn::KvCacheOptions one_layer{1, kv_heads, head_dim};

  void step() {
    Tree::Step step = tree_.begin_step();
    std::size_t tokens_left = static_cast<std::size_t>(random_.uniform(1, 100)), outputs = 0;
    for (auto& sequence : sequences_) {
      if (tokens_left == 0) break;
      const auto added = step.add(sequence, tokens_left);
      if (!added) continue;
      tokens_left -= static_cast<std::size_t>(added.row().num_rows);
      outputs += added.row().has_output ? 1 : 0;
    }
    if (step.num_rows() == 0) return;
    const auto plan = plan_.build(step);
    const auto rows = static_cast<std::size_t>(plan.num_rows);
    const auto q = numbers(rows * qo_heads), k = numbers(rows * kv_heads),
               v = numbers(rows * kv_heads);
    std::vector<float> out(q.size()), lse(rows * qo_heads);
    const auto view = part_.over(plan);
    own_.grow(part_.num_chunks(tree_.num_chunks()));
    if (own_.num_chunks() > 0) {
      attention_.write(own_.layer(0), view, k, v);
      attention_.run(own_.layer(0), view, q, out, {.lse = lse});
    } else {
      lse.assign(lse.size(), chunkattn::detail::empty_lse());  // it has no chunk so far
    }
    serve::merge_parts(ranks_, out, lse);
    serve::check_agreement(ranks_, "merged results", serve::Digest().add(out).add(lse));

    attention_.write(whole_.layer(0), plan, k, v);
    check(chunkattn::reference_attention(whole_.layer(0), plan, std::span<const float>(q)), out,
          lse);
    std::vector<int> tokens(outputs);
    for (int& token : tokens) token = random_.uniform(0, 9);
    std::move(step).finish().commit(tokens);
  }

  std::vector<float> numbers(std::size_t heads) {
    std::vector<float> values(heads * head_dim);
    for (float& value : values) value = random_.normal();
    return values;
  }

  /// A merge weighs results by exp(lse): an error of a part's lse is one of its weight, relative.
  void check(const chunkattn::Reference& reference, const std::vector<float>& out,
             const std::vector<float>& lse) const {
    for (std::size_t line = 0; line < lse.size(); ++line) {
      const double lse_bound = ranks_.size() * reference.lse_bound(line);
      expect(std::abs(double(lse[line]) - reference.lse[line]) <= lse_bound, "lse", line);
      for (std::size_t i = line * head_dim; i < (line + 1) * head_dim; ++i) {
        const double bound = reference.bound(i, 0x1p-24) + 2 * lse_bound * reference.abs_v[i];
        expect(std::abs(double(out[i]) - reference.out[i]) <= bound, "out", i);
      }
    }
  }
  static void expect(bool good, const char* what, std::size_t index) {
    if (!good)
      throw std::logic_error(std::string(what) + "[" + std::to_string(index) +
                             "] is not what the oracle says");
  }

  serve::Communicator& ranks_;
  Random random_;
  serve::ContextPart part_;
  Tree tree_{{}, {.sharing = chunkattn::TreeOptions::Sharing::chunk}, {.retains = false}};
  chunkattn::AttentionPlan plan_;
  chunkattn::ThreadPool pool_{1};
  chunkattn::ChunkAttention<chunkattn::Cpu, head_dim> attention_{pool_};
  chunkattn::KvCache<chunkattn::Cpu, float> own_{chunk_size, one_layer};
  chunkattn::KvCache<chunkattn::Cpu, float> whole_{tree_, one_layer};
  std::vector<Tree::Sequence> sequences_;
};

}  // namespace test
