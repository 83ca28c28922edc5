// The last page of the program: memory, decode time, accuracy; for a person and as JSON.
#pragma once

#include <fmt/format.h>

#include <string>

#include "../support/table.hpp"
#include "compare.hpp"
#include "serve.hpp"
#include "settings.hpp"

namespace shared_prompt {

inline constexpr double target_over_shared_pages = 3, target_over_unshared = 5,
                        target_bandwidth = 0.8;

inline void print_memory(const MemoryReport& m) {
  examples::section("K/V memory of one layer");
  examples::Table table({"<", "chunks", "tokens", "bytes"});
  table.row({"without sharing", examples::grouped(m.unshared_chunks), examples::grouped(m.tokens),
             examples::bytes_text(m.bytes_unshared)});
  table.row({"chunkattn", examples::grouped(m.chunks), examples::grouped(m.stored_tokens),
             examples::bytes_text(m.bytes_shared)});
  table.print();
  fmt::print("\n");
  examples::paragraph(fmt::format(
      "{} times less memory. {} of {:.0f} tokens are common to all: r = {:.3f}. The paper expects "
      "1/(1-r) = {:.1f} times for many sequences, which is {:.1f} for {}; what smaller groups "
      "share "
      "comes on top, slots left empty in chunks come off. Empty slots: {:.2f} % of all tokens; "
      "the paper's bound (c-1)/n is {:.2f} %.",
      examples::bold(fmt::format("{:.1f}", m.ratio())), examples::grouped(m.common_tokens),
      m.mean_length(), m.sharing(), m.paper_limit(), m.paper_at_batch(), m.requests,
      100 * m.waste(), 100 * m.waste_bound()));
}

inline void print_decode(const CompareReport& r) {
  const Variant& ours = r.ours();
  examples::section("One decode step of the full batch");
  examples::Table table({"<", "ms/step", "ours is", "<reached", "max error"});
  for (const Variant& v : r.variants) {
    const bool is_ours = &v == &ours;
    table.row(
        {is_ours ? examples::bold(v.name) : v.name, fmt::format("{:.2f}", v.time()),
         is_ours ? "" : examples::green(fmt::format("{:.1f}x faster", v.time() / ours.time())),
         fmt::format("{:3.0f} % of {}", 100 * v.of_limit(), v.limit_name),
         fmt::format("{:.1e}", v.max_error)});
  }
  table.print();
  fmt::print("\n");
  examples::paragraph(fmt::format(
      "Medians of {} rounds in turns, each from cold memory. The paged ones run the library's own "
      "kernel with one plan row per sequence; \"shared pages\" is the paper's PagedAttn*. Errors "
      "are "
      "against the oracle in double precision on the same K/V.",
      r.rounds));
  examples::paragraph(fmt::format(
      "Reached: the fastest round against the fastest that this machine was seen to be in this "
      "run, "
      "by plain sweeps or by one of the above: {:.1f} GB/s from memory, {:.1f} GB/s from cache, "
      "{:.0f} GFLOP/s.",
      r.memory_read * 1e-9, r.cache_read * 1e-9, r.fma * 1e-9));
  if (!r.skipped.empty()) examples::paragraph(r.skipped + ".");
}

inline void print_serving(const ServeReport& s) {
  fmt::print("\n");
  examples::paragraph(fmt::format(
      "{} prompt tokens: {} computed, {} ({:.1f} %) found in the cache or computed by a neighbour. "
      "{} tokens generated in {} steps, at most {} requests at once, {} chunks. Attention: {:.0f} "
      "ms "
      "for the prompts, {:.2f} ms per decode step; plan update {:.0f} µs, {} rebuilds.",
      examples::grouped(s.prompt_tokens), examples::grouped(s.computed_tokens),
      examples::grouped(s.prompt_tokens - s.computed_tokens),
      100.0 * static_cast<double>(s.prompt_tokens - s.computed_tokens) /
          static_cast<double>(s.prompt_tokens),
      examples::grouped(s.generated_tokens), s.steps, s.peak_live, s.peak_chunks, s.prefill_ms,
      median(s.decode_ms), median(s.update_us), s.plan_rebuilds));
}

/// Prints how the run compares with what the project promises. True if it keeps all of it.
inline bool print_verdict(const CompareReport& r, const Settings& settings) {
  const bool check = settings.check;
  bool ok = true;
  const auto line = [&](bool kept, const std::string& text) {
    ok &= kept;
    fmt::print("  {} {}\n", kept ? examples::green("ok ") : examples::red("low"), text);
  };
  double worst = 0;
  for (const Variant& v : r.variants) worst = std::max(worst, v.worst_of_bound);
  if (check) examples::section("Checks");
  if (check || worst > 1)
    line(worst <= 1, fmt::format("largest error: {:.2f} of the oracle's bound", worst));
  if (!check) return ok;
  if (settings.kv != "fp32" || settings.requests < 32 || settings.system_tokens != 0 ||
      settings.num_qo_heads != settings.num_kv_heads) {
    fmt::print("  ratios are promised for the default workload only\n");
    return ok;
  }
  const double ours = r.ours().time();
  if (const Variant* v = r.find("paged_shared"))
    line(v->time() >= target_over_shared_pages * ours,
         fmt::format("{:.2f}x faster than paged over shared pages, wanted {:.0f}", v->time() / ours,
                     target_over_shared_pages));
  if (const Variant* v = r.find("paged_unshared")) {
    line(v->time() >= target_over_unshared * ours,
         fmt::format("{:.2f}x faster than paged without sharing, wanted {:.0f}", v->time() / ours,
                     target_over_unshared));
    line(v->of_limit() >= target_bandwidth,
         fmt::format("paged without sharing reaches {:.0f} % of the read bandwidth, wanted {:.0f}",
                     100 * v->of_limit(), 100 * target_bandwidth));
  }
  return ok;
}

/// To the file of settings.json. \throws examples::OutputError
void write_json(const Settings& settings, const ServeReport& serving, const CompareReport& report);

}  // namespace shared_prompt
