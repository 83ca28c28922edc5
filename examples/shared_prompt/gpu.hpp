// --device cuda: one step of the full batch on the GPU, with and without sharing, against the CPU.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "../support/cuda_attention.hpp"
#include "../support/table.hpp"
#include "compare.hpp"
#include "serve.hpp"

namespace shared_prompt {

/// Query tokens of one step at most.
inline int max_rows(std::span<const Job> jobs, int prefill) {
  std::size_t rows = 0;
  for (const Job& job : jobs)
    rows += std::clamp<std::size_t>(job.prompt.size(), 1, static_cast<std::size_t>(prefill));
  return static_cast<int>(rows);
}

struct GpuReport {
  double shared_ms = 0, paged_ms = 0;  ///< medians
  double max_difference = 0;           ///< from the CPU's output for the same fp16 K and V
};

/// Outputs are means of values about 1; fp16 rounds Q and O by 2^-11 of their size.
inline constexpr double gpu_bound = 0.01;

template <class T, class Attention>
GpuReport compare_on_gpu(examples::CudaAttention& gpu, Attention& cpu, const Moment<T>& moment,
                         int rounds) {
  GpuReport report;
  std::vector<float> expected(moment.q.size()), out(moment.q.size());
  cpu.run(moment.kv, moment.plan, moment.q, std::span<float>(expected));
  std::vector<double> shared, paged;
  const auto run = [&](bool share) {
    const double ms = gpu.run(0, moment.plan, moment.q, out, share);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double difference = std::abs(static_cast<double>(out[i]) - expected[i]);
      report.max_difference =
          std::max(report.max_difference,
                   std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference);
    }
    return ms;
  };
  run(true), run(false);  // the first of each loads its kernels
  for (int r = 0; r < rounds; ++r) {
    shared.push_back(run(true));
    paged.push_back(run(false));
  }
  report.shared_ms = median(std::move(shared));
  report.paged_ms = median(std::move(paged));
  return report;
}

/// True if the outputs are as close as they should be.
inline bool print_gpu(const GpuReport& report, int rounds) {
  const bool close = report.max_difference <= gpu_bound;
  examples::section("One decode step of the full batch, on the GPU");
  examples::Table table({"<", "ms/step"});
  table.row({"every row reads its own path", fmt::format("{:.3f}", report.paged_ms)});
  table.row({examples::bold("chunkattn"), fmt::format("{:.3f}", report.shared_ms)});
  table.print();
  fmt::print("\n");
  examples::paragraph(fmt::format(
      "Medians of {} rounds on the host's clock, launches included; K and V may stay in the GPU's "
      "cache between rounds. Largest difference from the CPU: {:.1e} (bound {}) {}",
      rounds, report.max_difference, gpu_bound,
      close ? examples::green("ok") : examples::red("too far")));
  return close;
}

}  // namespace shared_prompt
