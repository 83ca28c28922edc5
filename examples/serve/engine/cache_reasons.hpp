// CacheReasons: why the prompts of requests were found in the engine's cache, or not.
#pragma once

#include <chunkattn/cache/explain.hpp>
#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "engine_tiers.hpp"
#include "engine_windows.hpp"

namespace serve {

template <class Tree>
class CacheReasons {
 public:
  /// \param windows, tiers  null where the engine has none; they outlive this
  CacheReasons(Tree& tree, std::size_t max_tokens, const EngineWindows<Tree>* windows,
               const EngineTiers<Tree>* tiers)
      : explainer_(tree, options_of(max_tokens, windows, tiers)) {}

  /// What is told of a prompt that is about to join.
  [[nodiscard]] CacheReport explain(std::span<const std::int32_t> prompt,
                                    const chunkattn::InsertOptions& options) const {
    return explainer_.explain(prompt, options);
  }
  /// It has joined.
  static void count(const CacheReport& report, EngineStats& stats) {
    for (const chunkattn::ExplainedRange& one : report.ranges)
      stats.reasons[static_cast<std::size_t>(one.reason)] +=
          static_cast<std::uint64_t>(one.range.length);
  }

 private:
  using Explainer = chunkattn::CacheExplainer<Tree>;
  using Prompt = typename Explainer::Prompt;
  static typename Explainer::Options options_of(std::size_t max_tokens,
                                                const EngineWindows<Tree>* windows,
                                                const EngineTiers<Tree>* tiers) {
    typename Explainer::Options options{.max_tokens = max_tokens};
    if (windows != nullptr)
      options.resume = [windows](Prompt prompt, const chunkattn::InsertOptions& how) {
        return windows->find(prompt, how);
      };
    if (tiers != nullptr)
      options.tiers = [tiers](Prompt prompt, const chunkattn::InsertOptions& how,
                              std::size_t begin) { return tiers->find(prompt, how, begin); };
    return options;
  }

  Explainer explainer_;
};

}  // namespace serve
