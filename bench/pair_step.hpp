// One attention call over and over, for bench/pairs.cpp: compiled once with the options of this
// machine and once with none, which is how most users compile.
#pragma once

#include <cstddef>
#include <memory>

#include "bench/decode_case.hpp"
#include "chunkattn/attention_options.hpp"
#include "chunkattn/executor.hpp"

namespace bench {

enum class Element { fp32, bf16, fp16, int8 };

/// What is computed.
struct StepCase {
  Batch batch;
  int num_qo_heads = 32;
  int num_kv_heads = 8;
  int head_dim = 128;
  Element element = Element::fp32;
  chunkattn::CpuOptions options{};
  bool bf16_queries = false;  ///< over bf16 K/V; else queries are fp32 that are no bfloat16
  bool share = true;  ///< false: every sequence has a copy of its own of what they have in common
  bool cold = true;   ///< each call finds its K/V in memory, not in a cache
  int window = 0;     ///< SlidingWindow of a decode step; 0: none
};

/// A call that can be timed.
struct Step {
  virtual ~Step() = default;
  virtual void run() = 0;
  double flops = 0;
  double bytes = 0;  ///< of K, V, queries and outputs, each read or written once
};

/// Everything that a step needs, built and warmed up. \p cold_bytes of K/V are kept in rotation for
/// a cold case. Null for a head_dim, element type or window that this build of it leaves out.
using MakeStep = std::unique_ptr<Step>(const StepCase& which, chunkattn::ThreadPool& pool,
                                       std::size_t cold_bytes);
MakeStep make_native_step;  ///< compiled with -march=native
MakeStep make_plain_step;   ///< compiled without: the path is chosen at run time

}  // namespace bench
