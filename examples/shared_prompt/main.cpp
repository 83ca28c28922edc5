// 32 chat requests over one long system prompt: they join while others decode, share what they have
// in common, and leave when their reply is complete. Then one step of the full batch is measured
// against attention that does not share, or shares memory only.
//
// There is no model: q, k and v come from a hash of the token and its position, the replies are
// written down in prompts.cpp. The cache, the plan and the attention are the real ones.
#include <chunkattn/element.hpp>

#include "../support/cuda_attention.hpp"
#include "../support/options.hpp"
#include "../support/output_file.hpp"
#include "settings.hpp"

namespace shared_prompt {
namespace {

int run_command_line(int argc, char** argv) {
  Settings settings;
  examples::Options options("shared_prompt",
                            "chat requests that share a long system prompt, served and measured");
  options.number("--requests", "N", "how many chat requests", settings.requests, 1, 1024);
  options.number("--system-tokens", "N", "cut the system prompt to so many tokens; 0: do not",
                 settings.system_tokens, 0, 1 << 20);
  options.number("--num-qo-heads", "N", "query heads", settings.num_qo_heads, 1, 256);
  options.number("--num-kv-heads", "N", "K/V heads; fewer than query heads: GQA",
                 settings.num_kv_heads, 1, 256);
  options.choice("--kv", {"fp32", "fp16", "bf16"}, "what K and V are stored as", settings.kv);
  options.number("--threads", "N", "0: one for each processor", settings.threads, 0, 1024);
  options.number("--prefill", "N", "prompt tokens of one request in one step", settings.prefill, 1,
                 1 << 20);
  options.number("--rounds", "N", "how often each way is measured", settings.rounds, 1, 1000);
  options.number("--memory", "GIB", "leave out baselines that need more", settings.memory_gib, 0.0,
                 1e6);
  options.choice("--device", {"cpu", "cuda"}, "where attention runs (cuda: in fp16)",
                 settings.device);
  options.text("--json", "FILE", "write all figures to FILE", settings.json);
  options.flag("--no-tree", "do not draw the tree", settings.hide_tree);
  options.flag("--check", "exit with 1 unless the promised ratios are kept", settings.check);
  if (!options.parse(argc, argv)) return 0;
  const bool cuda = settings.device == "cuda";
  if (cuda && !examples::built_with_cuda) throw examples::UsageError(examples::no_cuda_message);
  if (cuda && settings.kv == "bf16")
    throw examples::UsageError("--kv = bf16: expected fp16 with --device cuda");
  if (cuda && !settings.json.empty())
    throw examples::UsageError("--json: expected --device cpu beside it");
  if (cuda) settings.kv = "fp16";
  if (settings.num_qo_heads % settings.num_kv_heads != 0)
    throw examples::UsageError(
        fmt::format("--num-qo-heads = {}: expected a multiple of "
                    "--num-kv-heads = {}",
                    settings.num_qo_heads, settings.num_kv_heads));
  if (!settings.json.empty()) examples::require_writable(settings.json, examples::Devices::write);
  if (settings.kv == "fp16") return run<chunkattn::half>(settings);
  if (settings.kv == "bf16") return run<chunkattn::bfloat16>(settings);
  return run<float>(settings);
}

}  // namespace
}  // namespace shared_prompt

int main(int argc, char** argv) {
  return examples::guarded("shared_prompt",
                           [&] { return shared_prompt::run_command_line(argc, argv); });
}
