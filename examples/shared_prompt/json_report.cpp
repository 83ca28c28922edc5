// All figures of a run as JSON.
#include <nlohmann/json.hpp>
#include <string>

#include "../support/output_file.hpp"
#include "report.hpp"

namespace shared_prompt {

void write_json(const Settings& settings, const ServeReport& serving, const CompareReport& report) {
  using Json = nlohmann::ordered_json;
  const MemoryReport& m = report.memory;
  Json variants = Json::array();
  for (const Variant& v : report.variants)
    variants.push_back({{"variant", v.key},
                        {"ms_per_step", v.time()},
                        {"ratio_to_chunkattn", v.time() / report.ours().time()},
                        {"kv_bytes", v.held_bytes},
                        {"limit", v.limit_name},
                        {"limit_ms", v.floor_ms},
                        {"of_limit", v.of_limit()},
                        {"max_abs_error", v.max_error},
                        {"error_of_bound", v.worst_of_bound},
                        {"samples_ms", v.ms}});
  const Json document = {{"program", "shared_prompt"},
                         {"settings",
                          {{"requests", settings.requests},
                           {"num_qo_heads", settings.num_qo_heads},
                           {"num_kv_heads", settings.num_kv_heads},
                           {"head_dim", 128},
                           {"chunk_size", m.chunk_size},
                           {"kv", settings.kv},
                           {"threads", settings.threads},
                           {"rounds", report.rounds}}},
                         {"serving",
                          {{"steps", serving.steps},
                           {"prompt_tokens", serving.prompt_tokens},
                           {"prompt_tokens_computed", serving.computed_tokens},
                           {"generated_tokens", serving.generated_tokens},
                           {"peak_requests", serving.peak_live},
                           {"peak_chunks", serving.peak_chunks},
                           {"prefill_ms", serving.prefill_ms},
                           {"decode_ms_per_step", median(serving.decode_ms)},
                           {"plan_update_us", median(serving.update_us)},
                           {"plan_rebuilds", serving.plan_rebuilds}}},
                         {"memory",
                          {{"tokens", m.tokens},
                           {"stored_tokens", m.stored_tokens},
                           {"common_tokens", m.common_tokens},
                           {"bytes_without_sharing", m.bytes_unshared},
                           {"bytes_with_sharing", m.bytes_shared},
                           {"ratio", m.ratio()},
                           {"sharing_ratio_r", m.sharing()},
                           {"paper_ratio_many_sequences", m.paper_limit()},
                           {"paper_ratio_at_batch", m.paper_at_batch()},
                           {"unused_places", m.waste()},
                           {"paper_unused_bound", m.waste_bound()}}},
                         {"machine",
                          {{"memory_read_bytes_per_s", report.memory_read},
                           {"cache_read_bytes_per_s", report.cache_read},
                           {"fp32_flop_per_s", report.fma}}},
                         {"decode", variants}};
  const std::string text = document.dump(2) + "\n";
  examples::OutputFile file(settings.json, examples::Devices::write);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace shared_prompt
