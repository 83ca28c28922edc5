#include "metrics.hpp"

#include <fmt/format.h>

namespace serve {

namespace {

class Text {
 public:
  void about(const char* name, const char* type, const char* help) {
    text_ += fmt::format("# HELP chunkattn_{0} {2}\n# TYPE chunkattn_{0} {1}\n", name, type, help);
  }
  template <class Number>
  void value(const std::string& name, Number number) {
    text_ += fmt::format("chunkattn_{} {}\n", name, number);
  }
  /// A metric of one value.
  template <class Number>
  void one(const char* name, const char* type, const char* help, Number number) {
    about(name, type, help);
    value(name, number);
  }
  void histogram(const char* name, const char* help, const Histogram& h) {
    about(name, "histogram", help);
    for (std::size_t i = 0; i < h.bounds.size(); ++i)
      value(fmt::format("{}_bucket{{le=\"{}\"}}", name, h.bounds[i]), h.at_most[i]);
    value(fmt::format("{}_bucket{{le=\"+Inf\"}}", name), h.count);
    value(fmt::format("{}_sum", name), h.sum);
    value(fmt::format("{}_count", name), h.count);
  }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

}  // namespace

std::string metrics_text(const ServiceCounters& c, const TreeSnapshot& tree, bool matches) {
  Text text;
  text.one("requests", "gauge", "requests that wait or run", c.requests);
  text.one("requests_waiting", "gauge", "requests that the engine has not begun with", c.waiting);
  text.one("cache_salts", "gauge", "cache salts that are remembered", c.salts);
  text.one("requests_accepted_total", "counter", "requests that the engine has taken", c.accepted);
  text.about("requests_refused_total", "counter", "requests that were refused");
  const char* reasons[] = {"full", "late", "closing", "invalid", "failed", "error"};
  for (std::size_t i = 0; i < std::size(reasons); ++i)
    text.value(fmt::format("requests_refused_total{{reason=\"{}\"}}", reasons[i]), c.refused[i]);
  text.about("choices_finished_total", "counter", "texts that have ended");
  const char* ends[] = {"", "stop", "length", "cancelled", "deadline"};
  for (std::size_t i = 1; i < std::size(ends); ++i)
    text.value(fmt::format("choices_finished_total{{reason=\"{}\"}}", ends[i]), c.finished[i]);
  text.one("prompt_tokens_total", "counter", "tokens of prompts", c.prompt_tokens);
  if (matches) {
    text.one("cached_prompt_tokens_total", "counter", "of these, found in the cache",
             c.cached_tokens);
    text.about("explained_prompt_tokens_total", "counter",
               "tokens of prompts by what became of them in the cache (--explain)");
    for (std::size_t i = 0; i < num_cache_reasons; ++i)
      text.value(fmt::format("explained_prompt_tokens_total{{reason=\"{}\"}}",
                             chunkattn::name_of(static_cast<chunkattn::CacheReason>(i))),
                 c.engine.reasons[i]);
    text.one("recalled_tokens_total", "counter",
             "prompt tokens that were scored, known from earlier prompts",
             c.engine.recalled_tokens);
    text.one("rows_total", "counter", "tokens that went through the model", c.engine.rows);
    text.one("window_tokens_total", "counter",
             "tokens that the cache had, and that were computed again for windows",
             c.engine.window_tokens);
    text.one("tier_loaded_tokens_total", "counter", "tokens whose K/V came from tiers",
             c.engine.tiers.loaded_tokens);
  }
  text.one("scored_items_total", "counter", "items of requests for scores", c.scored_items);
  text.one("scored_tokens_total", "counter", "prompt tokens whose log-probabilities were wanted",
           c.engine.scored_tokens);
  text.one("generated_tokens_total", "counter", "tokens that were generated", c.generated_tokens);
  text.histogram("first_token_seconds", "from a request to its first token", c.first_token);
  text.histogram("request_seconds", "from a request to its end", c.whole);
  text.about("chunks", "gauge", "chunks of K/V");
  text.value("chunks{state=\"used\"}", tree.chunks_used);
  text.value("chunks{state=\"cached\"}", tree.chunks_cached);
  text.value("chunks{state=\"free\"}", tree.chunks_free);
  text.about("window_chunks", "gauge", "chunks of K/V of layers with a window");
  text.value("window_chunks{state=\"used\"}", tree.windows.chunks_used);
  text.value("window_chunks{state=\"cached\"}", tree.windows.chunks_cached);
  text.value("window_chunks{state=\"free\"}", tree.windows.chunks_free);
  text.about("chunk_bytes", "gauge", "bytes of K/V of a chunk");
  text.value("chunk_bytes{pool=\"chunks\"}", tree.chunk_bytes);
  text.value("chunk_bytes{pool=\"window_chunks\"}", tree.windows.chunk_bytes);
  text.one("evicted_tokens_total", "counter", "cached tokens that had to make room",
           tree.evicted_tokens);
  text.one("evicted_window_chunks_total", "counter", "cached chunks of windows that did",
           tree.windows.evicted_chunks);
  text.one("steps_total", "counter", "forward passes", c.engine.steps);
  text.one("preemptions_total", "counter", "sequences that had to make room", c.engine.preemptions);
  text.one("swaps_total", "counter", "of these, copied to host memory", c.engine.swaps);
  text.one("recomputed_tokens_total", "counter", "tokens computed again", c.engine.recomputed);
  text.one("tier_loads_total", "counter", "sequences that something was looked for below",
           c.engine.tiers.loads);
  text.one("tier_loads_late_total", "counter", "of these, given up for computing",
           c.engine.tiers.loads_late);
  text.one("tier_refused_blocks_total", "counter", "blocks that were damaged, or others",
           c.engine.tiers.refused_blocks);
  text.one("tier_stored_bytes_total", "counter", "bytes that went to the last tier",
           c.engine.tiers.stored_bytes);
  return text.take();
}

}  // namespace serve
