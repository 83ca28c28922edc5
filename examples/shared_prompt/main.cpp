// 32 chat requests over one long system prompt: they join while others decode, share what they have
// in common, and leave when their reply is complete. Then one step of the full batch is measured
// against attention that does not share, or shares memory only.
//
// There is no model: q, k and v come from a hash of the token and its position, the replies are
// written down in prompts.cpp. The cache, the plan and the attention are the real ones.
#include <chunkattn/chunkattn.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "../support/options.hpp"
#include "../support/table.hpp"
#include "../support/word_tokenizer.hpp"
#include "compare.hpp"
#include "prompts.hpp"
#include "report.hpp"
#include "serve.hpp"
#include "tree_picture.hpp"

namespace shared_prompt {
namespace {

constexpr int head_dim = 128, chunk_size = 64;

// What the kernels were compiled for.
#if defined(CHUNKATTN_ISA_AVX512)
constexpr const char* instruction_set = "AVX-512";
#elif defined(CHUNKATTN_ISA_AVX2)
constexpr const char* instruction_set = "AVX2";
#elif defined(CHUNKATTN_ISA_NEON)
constexpr const char* instruction_set = "NEON";
#else
constexpr const char* instruction_set = "portable";
#endif

std::vector<Job> make_jobs(int count, examples::WordTokenizer& tokenizer) {
  constexpr int groups = 8, steps_between = 2, stride = 11;  // neighbours in the list join apart
  const int per_group = (count + groups - 1) / groups;
  const auto texts = requests();
  std::vector<Job> jobs;
  for (int i = 0; i < count; ++i) {
    const Request& request = texts[static_cast<std::size_t>(i * stride) % texts.size()];
    const int copy = i / static_cast<int>(texts.size());
    Job job;
    job.title = std::string(request.title) + (copy != 0 ? " #" + std::to_string(copy + 1) : "");
    job.prompt = tokenizer.encode(prompt_text(request, copy));
    job.reply = tokenizer.encode(request.reply);
    job.join_step = i / per_group * steps_between;
    jobs.push_back(std::move(job));
  }
  return jobs;
}

template <class T>
void draw_tree(const Moment<T>& moment, const std::vector<Job>& jobs,
               const examples::WordTokenizer& tokenizer) {
  examples::section(fmt::format("The tree at step {}: {} requests, {} chunks of {}", moment.step,
                                moment.plan.num_rows, moment.tree.used_slots,
                                moment.plan.chunk_size));
  const auto job_of = [&](int row) -> const Job& {
    return jobs[moment.jobs[static_cast<std::size_t>(moment.plan.row_token[row])]];
  };
  const auto text = [&](int row, int begin, int end) {
    const Job& job = job_of(row);
    std::string out;
    for (int p = begin; p < end && out.size() < 120; ++p) {
      const auto at = static_cast<std::size_t>(p);
      out += tokenizer.decode(at < job.prompt.size() ? job.prompt[at]
                                                     : job.reply[at - job.prompt.size()]);
    }
    return out;
  };
  TreePicture(moment.plan, text, [&](int row) { return job_of(row).title; }).print();
}

template <class T>
int run(const Settings& settings) {
  chunkattn::ThreadPool executor(settings.threads);
  examples::WordTokenizer tokenizer;
  const std::size_t common = tokenizer.encode(system_prompt()).size();
  const std::vector<Job> jobs = make_jobs(settings.requests, tokenizer);
  fmt::print("{}  {} chat requests over a system prompt of {} tokens\n",
             examples::bold("chunkattn"), jobs.size(), examples::grouped(common));
  fmt::print("{}\n",
             examples::dim(fmt::format(
                 "{} query heads, {} K/V heads of {}, {} K/V, chunks of {}, {} thread{}, {}",
                 settings.num_qo_heads, settings.num_kv_heads, head_dim, settings.kv, chunk_size,
                 executor.concurrency(), executor.concurrency() == 1 ? "" : "s", instruction_set)));

  examples::section("Serving");
  CompareReport comparison;
  ServeReport serving;
  {
    Server<T, head_dim, chunk_size> server(executor, settings.num_qo_heads, settings.num_kv_heads,
                                           settings.prefill);
    serving = server.run(jobs, [&](const Moment<T>& moment) {
      if (!settings.hide_tree) draw_tree(moment, jobs, tokenizer);
      fmt::print("\n  measuring ...\n");
      std::fflush(stdout);
      comparison = compare<head_dim>(executor, server.attention(), moment, settings.rounds,
                                     settings.memory_gib * 0x1p30);
      examples::section("Serving, continued");
    });
  }
  print_serving(serving);
  print_memory(comparison.memory);
  print_decode(comparison);
  const bool ok = print_verdict(comparison, settings.check);
  if (!settings.json.empty()) {
    Settings actual = settings;
    actual.threads = executor.concurrency();
    write_json(actual, serving, comparison);
    fmt::print("\n  written to {}\n", settings.json);
  }
  return ok ? 0 : 1;
}

int run(int argc, char** argv) {
  Settings settings;
  examples::Options options("shared_prompt",
                            "chat requests that share a long system prompt, served and measured");
  options.number("--requests", "N", "how many chat requests", settings.requests, 1, 1024);
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
  options.choice("--device", {"cpu", "cuda"}, "where attention runs", settings.device);
  options.text("--json", "FILE", "write all figures to FILE", settings.json);
  options.flag("--no-tree", "do not draw the tree", settings.hide_tree);
  options.flag("--check", "exit with 1 unless the promised ratios are kept", settings.check);
  if (!options.parse(argc, argv)) return 0;
  if (settings.device == "cuda")
    throw examples::UsageError("--device = cuda: this program is built for the CPU only");
  if (settings.num_qo_heads % settings.num_kv_heads != 0)
    throw examples::UsageError(
        fmt::format("--num-qo-heads = {}: expected a multiple of "
                    "--num-kv-heads = {}",
                    settings.num_qo_heads, settings.num_kv_heads));
  if (settings.kv == "fp16") return run<chunkattn::half>(settings);
  if (settings.kv == "bf16") return run<chunkattn::bfloat16>(settings);
  return run<float>(settings);
}

}  // namespace
}  // namespace shared_prompt

int main(int argc, char** argv) {
  return examples::guarded("shared_prompt", [&] { return shared_prompt::run(argc, argv); });
}
