// The whole program for one element type of K and V: included by one source file for each, so that
// they compile side by side.
#pragma once

#include <fmt/format.h>

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../support/cuda_attention.hpp"
#include "../support/table.hpp"
#include "../support/word_tokenizer.hpp"
#include "compare.hpp"
#include "gpu.hpp"
#include "prompts.hpp"
#include "report.hpp"
#include "serve.hpp"
#include "settings.hpp"
#include "tree_picture.hpp"

namespace shared_prompt {

inline constexpr int head_dim = 128, chunk_size = 64;

/// \param cut  drop so many of the tokens that all prompts begin with
inline std::vector<Job> make_jobs(int count, std::ptrdiff_t cut,
                                  examples::WordTokenizer& tokenizer) {
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
    job.prompt.erase(job.prompt.begin(), job.prompt.begin() + cut);
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
                                moment.plan.num_rows, moment.tree.used_chunks,
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
  std::size_t common = tokenizer.encode(system_prompt()).size();
  std::size_t cut = 0;
  if (settings.system_tokens != 0 && static_cast<std::size_t>(settings.system_tokens) < common)
    cut = common - static_cast<std::size_t>(settings.system_tokens);
  common -= cut;
  const std::vector<Job> jobs =
      make_jobs(settings.requests, static_cast<std::ptrdiff_t>(cut), tokenizer);
  fmt::print("{}  {} chat requests over a system prompt of {} tokens\n",
             examples::bold("chunkattn"), jobs.size(), examples::grouped(common));
  fmt::print("{}\n",
             examples::dim(fmt::format(
                 "{} query heads, {} K/V heads of {}, {} K/V, chunks of {}, {} thread{}, {}",
                 settings.num_qo_heads, settings.num_kv_heads, head_dim, settings.kv, chunk_size,
                 executor.concurrency(), executor.concurrency() == 1 ? "" : "s",
                 chunkattn::instruction_set())));

  std::unique_ptr<examples::CudaAttention> gpu;
  if (settings.device == "cuda")
    gpu = examples::make_cuda_attention({.num_layers = 1,
                                         .num_qo_heads = settings.num_qo_heads,
                                         .num_kv_heads = settings.num_kv_heads,
                                         .head_dim = head_dim,
                                         .chunk_size = chunk_size,
                                         .max_rows = max_rows(jobs, settings.prefill)});

  examples::section("Serving");
  CompareReport comparison;
  ServeReport serving;
  GpuReport on_gpu;
  {
    Server<T, head_dim, chunk_size> server(executor, settings.num_qo_heads, settings.num_kv_heads,
                                           settings.prefill, gpu.get());
    serving = server.run(jobs, [&](const Moment<T>& moment) {
      if (!settings.hide_tree) draw_tree(moment, jobs, tokenizer);
      fmt::print("\n  measuring ...\n");
      std::fflush(stdout);
      if (gpu != nullptr) {
        comparison.memory = measure_memory(moment);
        on_gpu = compare_on_gpu(*gpu, server.attention(), moment, settings.rounds);
      } else {
        comparison = compare<head_dim>(executor, server.attention(), moment, settings.rounds,
                                       settings.memory_gib * 0x1p30);
      }
      examples::section("Serving, continued");
    });
  }
  print_serving(serving);
  print_memory(comparison.memory);
  if (gpu != nullptr) return print_gpu(on_gpu, settings.rounds) || !settings.check ? 0 : 1;
  print_decode(comparison);
  const bool ok = print_verdict(comparison, settings);
  if (!settings.json.empty()) {
    Settings actual = settings;
    actual.threads = executor.concurrency();
    write_json(actual, serving, comparison);
    fmt::print("\n  written to {}\n", settings.json);
  }
  return ok ? 0 : 1;
}

}  // namespace shared_prompt
