// CacheExplainer: why a prompt was found in a tree, or was not.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chunkattn/cache/explain.hpp>

#include "python.hpp"

namespace binding {
namespace {

using nb::literals::operator""_a;
using Explainer = chunkattn::CacheExplainer<Tree>;

/// \param resume  find() of WindowedGroups or Checkpoints, or None
Explainer::Options options_of(std::size_t max_tokens, nb::object resume) {
  Explainer::Options options{.max_tokens = max_tokens};
  if (!resume.is_none())
    options.resume = [resume](Explainer::Prompt prompt, const chunkattn::InsertOptions& how) {
      const nb::object tokens = array_of(std::vector<Token>(prompt.begin(), prompt.end()));
      return nb::cast<std::size_t>(
          resume(tokens, "tenant"_a = how.name_space.tenant, "adapter"_a = how.name_space.adapter,
                 "public_length"_a = how.public_length, "max_reuse"_a = how.max_reuse));
    };
  return options;
}

nb::dict report_of(const Explainer::Explanation& told) {
  nb::list ranges;
  for (const chunkattn::ExplainedRange& range : told.ranges) {
    nb::dict one;
    one["begin"] = range.range.begin, one["end"] = range.range.end();
    one["reason"] = chunkattn::name_of(range.reason);
    if (range.reason == chunkattn::CacheReason::evicted)
      one["cause"] = chunkattn::name_of(range.cause), one["tokens_ago"] = range.tokens_ago;
    ranges.append(one);
  }
  nb::dict all;
  all["ranges"] = ranges;
  if (told.parting) {
    all["parts_at"] = told.parting->position;
    if (told.parting->cached) all["cached_token"] = *told.parting->cached;
  }
  return all;
}

}  // namespace

void bind_explain(nb::module_& module) {
  nb::class_<Explainer> explainer(
      module, "CacheExplainer",
      "Follows what a tree evicts, and says why a prompt is found in it, or is not.\n\n"
      "max_tokens: evicted ones of which all is known. resume: find() of the WindowedGroups or "
      "Checkpoints of a model that has any.");
  explainer.def(
      "__init__",
      [](Explainer* memory, Tree& tree, std::size_t max_tokens, nb::object resume) {
        new (memory) Explainer(tree, options_of(max_tokens, std::move(resume)));
      },
      "tree"_a, "max_tokens"_a = std::size_t{1} << 18, nb::kw_only(), "resume"_a = nb::none(),
      nb::keep_alive<1, 2>());
  define_with_prompt(
      explainer, "explain",
      [](const Explainer& e, const std::vector<Token>& tokens,
         const chunkattn::InsertOptions& options) {
        return report_of(e.explain(some(tokens), options));
      },
      "Of each range of a prompt, what becomes of it if it is inserted, and where it parts from "
      "what is cached. Of other tenants it says nothing.");
}

}  // namespace binding
