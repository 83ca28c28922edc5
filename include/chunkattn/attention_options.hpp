// What every backend's ChunkAttention is declared from: the options and the primary template.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "detail/attention/accuracy.hpp"
#include "detail/base/config.hpp"
#include "detail/base/instruction_sets.hpp"
#include "error.hpp"
#include "fwd.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// How partial results of the same rows are brought together, where several tasks share them.
enum class Reduce {
  /// Merged in a fixed order by whoever finishes last: the same tree, batch, plan, build and
  /// instruction set give the same bits for any number of threads.
  deterministic,
  /// Merged as they come under a spin lock per (row block, KV head), the paper's rule for CPUs;
  /// work is cut by the number of threads.
  spin_lock,
  /// A row's bits depend on its own tokens and query, types and instruction set alone: a prefix
  /// found in the cache gives the bits of a cold run, in any batch, for any number of threads. What
  /// rows share is still read once for all, but walks are never cut along KV: with few rows and
  /// heads, many threads have less to do. Not with -ffast-math. CPU only.
  batch_invariant,
};

/// How attention is computed.
struct AttentionOptions {
  float sm_scale = 0;                     ///< factor of q·k, finite; 0: 1 / sqrt(HeadDim)
  Reduce reduce = Reduce::deterministic;  ///< how partial results meet
  /// CPU: cut work along KV until there are about this many tasks, where each stays worth it.
  /// 0: 64 in deterministic mode and where nothing is shared, else four per thread.
  int min_tasks = 0;
  /// CPU: how many KV heads a task may read together where everything is streamed; 0: as many as
  /// fit. Reading them together is faster, unless sequences name the same slots and the plan does
  /// not know it (block tables without a tree): then 1 leaves what they share in the caches.
  int max_task_heads = 0;
  /// CPU: from how many query lines on (rows times query heads per KV head) what they share is
  /// computed by matrix products, below it is streamed; 0: from where on that was measured faster.
  int min_product_lines = 0;
  /// CPU: whose vectors compute; automatic: see instruction_set().
  InstructionSet instruction_set = InstructionSet::automatic;
  /// CPU: the least accuracy of products. Reduce::batch_invariant computes in fp32 whatever it is.
  Accuracy accuracy = Accuracy::two_terms;
};

namespace detail {

/// The factor of q·k that the option sm_scale stands for. Refuses what is negative or not finite,
/// by the bits, which -ffast-math leaves alone.
[[nodiscard]] inline float resolved_sm_scale(float sm_scale, int head_dim) {
  const auto bits = std::bit_cast<std::uint32_t>(sm_scale);
  check_argument(bits < 0x7f800000u || bits == 0x80000000u, "options.sm_scale", sm_scale,
                 "a positive finite factor, or 0 for 1 / sqrt(HeadDim)");
  return sm_scale != 0 ? sm_scale
                       : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Attention over a prefix tree's plan on one device. Backends specialise it.
template <class Device, int HeadDim, class Exec, int ValueDim>
class ChunkAttention {
  static_assert(!std::is_same_v<Device, Cuda>,
                "ChunkAttention<Cuda, HeadDim> needs nvcc: compile the file that uses it as CUDA "
                "(.cu), where chunkattn/chunkattn.hpp brings the CUDA backend");
  static_assert(!std::is_same_v<Device, Cpu>,
                "ChunkAttention<Cpu, HeadDim>: include chunkattn/chunk_attention.hpp");
  static_assert(std::is_same_v<Device, Cuda> || std::is_same_v<Device, Cpu>,
                "ChunkAttention<Device, HeadDim>: Device must be chunkattn::Cpu or "
                "chunkattn::Cuda");
};

CHUNKATTN_ISA_NAMESPACE_END
