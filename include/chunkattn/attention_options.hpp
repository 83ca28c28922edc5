// How attention is computed: the options of ChunkAttention on the CPU, and how far kernels may
// round.
#pragma once

#include <type_traits>

#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/base/instruction_sets.hpp"
#include "element.hpp"
#include "fwd.hpp"
#include "instruction_set.hpp"

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

/// How accurate products must be at least. It matters where the processor has a matrix unit
/// (InstructionSet::amx) and K and V are stored in 16 or 8 bits; anything else computes in fp32.
/// Such a unit multiplies bfloat16 and adds up in fp32, so queries and probabilities become sums of
/// bfloat16 terms; 16- and 8-bit K and V are such sums already. rounding_of() has the errors.
enum class Accuracy {
  /// No matrix unit: everything in fp32, to about 2^-22 of the largest terms of a sum.
  fp32,
  /// Two terms: each query element and probability off by at most 2^-17 of itself (half K and V:
  /// 2^-15.4), which is below what storing outputs in 16 bits costs.
  two_terms,
  /// One term, the fastest: off by at most 2^-8 of itself, for half K and V by 2^-7. Logits of size
  /// s are off by up to s / 256.
  one_term,
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

/// The most query heads of a call: what is counted per row and head then stays within 32 bits.
inline constexpr int max_qo_heads = 1 << 16;

/// How a kernel rounds on the way to its output, beyond what fp32 does; relative.
struct Rounding {
  double p;      ///< of the probabilities and values as they are fed to PV
  double logit;  ///< of queries and keys as they are fed to QK

  /// fp32, unless told otherwise.
  constexpr Rounding(double p_ = 0x1p-24, double logit_ = 0) noexcept : p(p_), logit(logit_) {}
};

/// The largest rounding errors of products over K and V of T, by tiles (see Accuracy). Two terms of
/// bfloat16 hold a float but for 2^-17 of it, and K and V exactly. Of half K and V, which are two
/// terms themselves, the product of both second terms is left out: another 2^-16.
template <class T>
[[nodiscard]] constexpr Rounding rounding_of(Accuracy accuracy) noexcept {
  constexpr bool is_half = std::is_same_v<T, half>;
  if (std::is_same_v<T, float> || accuracy == Accuracy::fp32) return {};
  const double u =
      accuracy == Accuracy::two_terms ? (is_half ? 0x3p-17 : 0x1p-17) : (is_half ? 0x2p-8 : 0x1p-8);
  return {u, u};
}

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
