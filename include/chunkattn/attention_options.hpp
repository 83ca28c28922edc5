// CpuOptions and CudaOptions: how ChunkAttention computes on each backend, and which instruction
// set runs on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "detail/support/amx.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "detail/support/dot_units.hpp"
#include "detail/support/instruction_sets.hpp"
#include "fwd.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN

template <class Device, int HeadDim, int ValueDim = HeadDim, class Exec = ThreadPool>
class ChunkAttention;

CHUNKATTN_ISA_NAMESPACE_END

CHUNKATTN_NAMESPACE_BEGIN

/// Options of ChunkAttention::run(), the same on both devices.
template <class Device>
struct RunOptions {
  /// [num_rows][num_qo_heads], in the device's memory: gets the natural logarithm of the softmax
  /// denominators; or empty.
  std::span<float> lse{};
  DeviceStream<Device> stream{};  ///< GPU: what the kernels are enqueued on, as write() was
};

/// The instruction set that CPU kernels use. `portable` is plain C++ with vectors of four, many
/// times slower. `avx2` stands for AVX2, FMA, F16C and BMI; `avx512` for AVX-512 F, BW, DQ and VL;
/// `amx` for these with AMX-TILE and AMX-BF16, whose tiles multiply 16- and 8-bit K and V.
/// `automatic`: the best that the build and the processor have.
enum class InstructionSet { automatic, portable, neon, avx2, avx512, amx };

/// How attention is computed on the CPU.
struct CpuOptions {
  /// How partial results of the same rows are merged, where several tasks compute them (the paper's
  /// section 3.3).
  enum class Reduce {
    /// Merged in a fixed order by the last task to finish: the same tree, batch, plan, build and
    /// instruction set give the same bits for any number of threads.
    deterministic,
    /// Merged in any order under a spin lock per (row block, KV head), the paper's rule for CPUs.
    /// How work is cut depends on the number of threads.
    spin_lock,
    /// A row's bits depend on its own tokens and query, types and instruction set alone: a prefix
    /// found in the cache gives the bits of a cold run, in any batch, for any number of threads.
    /// What rows share is still read once for all, but walks are never cut along KV: with few rows
    /// and heads, many threads have less to do. Not with -ffast-math. CPU only.
    batch_invariant,
  };

  /// How accurate products must be at least. It matters where something else than vectors of fp32
  /// may compute them:
  ///
  /// - A matrix unit (InstructionSet::amx), for K and V of 16 or 8 bits. It multiplies bfloat16 and
  ///   adds up in fp32, so queries and probabilities become sums of bfloat16 terms; 16- and 8-bit K
  ///   and V are such sums already.
  /// - Dot products of pairs of bfloat16 (avx512 where VDPBF16PS is fast, neon where BFDOT is),
  ///   for bfloat16 K and V, likewise; with two terms only for queries that are bfloat16 by value,
  ///   which are exact then.
  /// - Dot products of bytes (avx512 with VNNI, neon with FEAT_DotProd) or of int16 (avx2), for
  ///   int8 K and V. They take queries and probabilities as integers of 16 bits: off by at most
  ///   2^-15.9 of a query's largest element, and by 2^-16 of the largest probability (avx2: 2^-15),
  ///   whatever the accuracy but for fp32.
  enum class Accuracy {
    /// None of these: everything in fp32, to about 2^-22 of the largest terms of a sum.
    fp32,
    /// Two terms: each query element and probability off by at most 2^-17 of
    /// itself (half K and V: 2^-15.4), which is below what storing outputs in 16 bits costs.
    two_terms,
    /// One term, the fastest: off by at most 2^-8 of itself, for half K and V by 2^-7. Logits of
    /// size s are off by up to s / 256.
    one_term,
  };

  /// Factor of q·k, positive and finite; unset: 1 / sqrt(HeadDim).
  std::optional<float> sm_scale{};
  Reduce reduce = Reduce::deterministic;  ///< how partial results are merged
  /// Which instruction set runs; automatic: see instruction_set().
  InstructionSet instruction_set = InstructionSet::automatic;
  /// The least accuracy of products. Reduce::batch_invariant always computes in fp32.
  Accuracy accuracy = Accuracy::two_terms;

  /// How work is cut and computed: for measurements, and if more is known than is in the plan.
  struct Tuning {
    /// Work is cut along the tokens of K/V until there are about this many tasks, unless they would
    /// become too short. Unset: 64 in deterministic mode and where nothing is shared, else four per
    /// thread.
    std::optional<int> min_tasks{};
    /// How many KV heads a task may read together where nothing is computed by matrix products;
    /// unset: as many as fit. Reading them together is faster, unless sequences share chunks that
    /// the plan does not know to be shared (block tables without a tree): with 1 these stay in the
    /// caches.
    std::optional<int> max_task_heads{};
    /// From how many query-head rows on (rows times query heads per KV head) shared K/V is computed
    /// by matrix products; with fewer, K/V is streamed. Unset: from where on products were measured
    /// to be faster.
    std::optional<int> min_product_lines{};
  };
  Tuning tuning{};  ///< see Tuning
};

namespace detail {
using Reduce = CpuOptions::Reduce;
using Accuracy = CpuOptions::Accuracy;
}  // namespace detail

/// Options of attention on a GPU.
struct CudaOptions {
  /// How work is cut and merged; always in the same order, so that the same plan and object give
  /// the same bits.
  enum class Reduce {
    /// By what is fastest for the plan.
    deterministic,
    /// A row's bits depend on its own tokens and query, on types and the variant alone, as on the
    /// CPU: a prefix found in the cache gives the bits of a cold run, in any batch. Paths are cut
    /// where their positions are multiples of 256: a row has a partial result for each 256 tokens
    /// before its last, which Limits::max_partial_rows must hold. Not with infinities in V, nor for
    /// variants that use `row`.
    batch_invariant,
  };

  /// Factor of q·k, positive and finite; unset: 1 / sqrt(HeadDim).
  std::optional<float> sm_scale{};
  Reduce reduce = Reduce::deterministic;  ///< how work is cut and merged
  /// Device memory of workspace_size(limits) bytes, aligned to 256 bytes; null: the constructor
  /// allocates it.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;  ///< size of `workspace`
  /// Whether to ask the driver if q, k, v and out are device memory, once per new address.
  bool check_pointers = true;
  /// Whether to refuse a stream while work that was enqueued on another is not done. Costs an event
  /// per call; on in debug builds.
#if defined(NDEBUG)
  bool check_streams = false;
#else
  bool check_streams = true;
#endif

  /// The largest plan that an object takes. Its workspace, addresses and grids follow from these
  /// and never change, so that a captured graph serves all plans within them. A field that is not
  /// set has the value in its comment.
  struct Limits {
    std::int32_t max_rows = 0;                   ///< query tokens of a step; required
    std::int32_t num_qo_heads = 0;               ///< query heads; required
    std::int32_t num_kv_heads = 0;               ///< KV heads; required
    std::optional<std::int32_t> max_segments{};  ///< segments; 4 * max_rows
    std::optional<std::int32_t> max_pieces{};  ///< extent of the piece array; 64 * max_rows + 4096
    std::optional<std::int32_t> max_copies{};  ///< row copies; max_rows
    /// Rows with partial results, counted once for each range of K/V that several tasks read;
    /// 4 * max_rows + 256, at most 3328: what tasks for up to 1024 decoding rows have use for, and
    /// rows of long prompts have none. More rows that share a prefix in one step need more.
    std::optional<std::int32_t> max_partial_rows{};
    std::int32_t max_windows = 2;  ///< windows whose task lists are kept, up to 7
  };

  /// The cost model by which work is cut into tasks. Times are in picoseconds of one block
  /// that has its share of the device. The defaults describe an H200 by its copy bandwidth
  /// (4.3 TB/s over 132 multiprocessors with two blocks each: 16 bytes per ns and block; 27 where
  /// few others stream) and an mma.sync rate of about 380 TFLOP/s. They are estimates until the
  /// sweep of bench/cuda_sweep.cu has been fitted.
  struct Tuning {
    std::int64_t ps_per_kib = 63000;  ///< one block moving 1 KiB of device memory, all others too
    std::int64_t alone_ps_per_kib = 38000;  ///< one block moving 1 KiB, the memory idle otherwise
    std::int64_t ps_per_mflop = 690000;     ///< one block doing 10^6 floating-point operations
    std::int64_t task_ps = 1500000;         ///< start, first loads, epilogue
    /// 128 threads reading their columns of one partial result; four reads are under way at a time.
    std::int64_t merge_ps = 150000;
    /// The way to partial results of other tasks: their flags, and the first of them.
    std::int64_t wait_ps = 1000000;
    std::int32_t min_split_tokens = 64;  ///< no KV split is shorter
  };
  Tuning tuning{};  ///< see Tuning
};

/// The most query heads of a call.
inline constexpr int max_qo_heads = 1 << 16;

CHUNKATTN_NAMESPACE_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Attention over the plan of a prefix tree, on one device: see the specialisations for Cpu and
/// Cuda.
template <class Device, int HeadDim, int ValueDim, class Exec>
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

/// The name of an instruction set, as the macro CHUNKATTN_ISA and the environment variable
/// CHUNKATTN_CPU_ISA take it.
[[nodiscard]] constexpr const char* name_of(InstructionSet set) noexcept {
  constexpr const char* names[] = {"automatic", "portable", "neon", "avx2", "avx512", "amx"};
  const auto index = static_cast<unsigned>(set);
  return index < 6 ? names[index] : "no instruction set";
}

/// The instruction set that CPU kernels use unless CpuOptions say otherwise: "amx", "avx512",
/// "avx2", "neon" or "portable". It is the best one that both the build and the processor have; the
/// environment variable CHUNKATTN_CPU_ISA forces another.
/// \throws InvalidArgument if the forced one is not compiled in, or the processor lacks it
[[nodiscard]] inline const char* instruction_set();

/// instruction_set() and the others that were compiled, in one line for logs. Throws as that does.
[[nodiscard]] inline std::string describe_instruction_set();

CHUNKATTN_ISA_NAMESPACE_END

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// The instruction sets that this translation unit has kernels for, the slowest first.
inline constexpr InstructionSet compiled_sets[] = {
#if defined(CHUNKATTN_WITH_PORTABLE)
    InstructionSet::portable,
#endif
#if defined(CHUNKATTN_WITH_NEON)
    InstructionSet::neon,
#endif
#if defined(CHUNKATTN_WITH_AVX2)
    InstructionSet::avx2,
#endif
#if defined(CHUNKATTN_WITH_AVX512)
    InstructionSet::avx512,
#endif
#if defined(CHUNKATTN_WITH_AMX)
    InstructionSet::amx,
#endif
};

/// Whether the processor and the operating system have what kernels of `set` need.
[[nodiscard]] inline bool is_supported(InstructionSet set) noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();  // for objects that are made before main()
  // Every processor with AVX2 converts half precision (F16C), for which older compilers cannot ask.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (set == InstructionSet::avx2) return avx2;
  if (set == InstructionSet::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (set == InstructionSet::amx)
    return is_supported(InstructionSet::avx512) && amx_state() == AmxState::granted;
#endif
  return set == InstructionSet::portable || set == InstructionSet::neon;
}

/// Why a compiled instruction set does not run here, as "this processor lacks"; nothing if it does.
[[nodiscard]] inline std::string_view why_not(InstructionSet set) noexcept {
  if (is_supported(set)) return {};
#if defined(__x86_64__)
  if (set == InstructionSet::amx && amx_state() == AmxState::refused)
    return "the operating system refuses";
#endif
  return "this processor lacks";
}

/// Says which instruction sets run, and why `wanted` does not.
[[noreturn]] CHUNKATTN_COLD inline void fail_instruction_set(std::string_view argument,
                                                             std::string_view wanted) {
  std::string running, others, reason;
  for (std::size_t i = std::size(compiled_sets); i-- > 0;) {
    const std::string_view name = name_of(compiled_sets[i]), why = why_not(compiled_sets[i]);
    std::string& names = why.empty() ? running : others;
    names += detail::joined({names.empty() ? "" : ", ", name});
    if (wanted == name) reason = detail::joined({"; ", why, " ", name});
  }
  for (const InstructionSet set :
       {InstructionSet::portable, InstructionSet::neon, InstructionSet::avx2,
        InstructionSet::avx512, InstructionSet::amx})
    if (wanted == name_of(set) && reason.empty())
      reason = detail::joined({"; this build has no ", wanted, " kernels"});
  if (running.empty()) detail::fail_argument(argument, wanted, {"a processor with ", others});
  detail::fail_argument(argument, wanted, {"one of ", running, reason});
}

/// The instruction set that `wanted` (automatic: CHUNKATTN_CPU_ISA, else the best) stands for.
/// \throws InvalidArgument if this build or this processor lacks it
[[nodiscard]] inline InstructionSet resolved(InstructionSet wanted) {
  const char* const forced = std::getenv("CHUNKATTN_CPU_ISA");
  const bool is_forced =
      wanted == InstructionSet::automatic && forced != nullptr && *forced != '\0';
  for (std::size_t i = std::size(compiled_sets); i-- > 0;) {
    const InstructionSet set = compiled_sets[i];
    const bool fits = is_forced ? std::string_view(forced) == name_of(set)
                      : wanted == InstructionSet::automatic ? true
                                                            : wanted == set;
    if (fits && is_supported(set)) return set;
  }
  if (is_forced) fail_instruction_set("CHUNKATTN_CPU_ISA", forced);
  fail_instruction_set("options.instruction_set", name_of(wanted));
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

inline const char* instruction_set() {
  return name_of(detail::cpu::resolved(InstructionSet::automatic));
}
inline std::string describe_instruction_set() {
  std::string text = instruction_set();
  const char* separator = " of ";
  for (const InstructionSet set : detail::cpu::compiled_sets) {
    const std::string_view why = detail::cpu::why_not(set);
    text += std::string(separator) + name_of(set);
    if (!why.empty()) text += detail::joined({" (", why, " it)"});
    separator = ", ";
  }
  const bool neon = text.starts_with("neon ");
  const bool amx = text.starts_with("amx ");  // bfloat16 by its matrix unit
  if (!neon && !amx && !text.starts_with("avx512 ")) return text;
  const auto [bytes, pairs] = detail::cpu::dot_units();
  if (bytes) text += std::string("; products of int8 by ") + (neon ? "SDOT and UDOT" : "VPDPBUSD");
  if (pairs && !amx)
    text += std::string("; products of bfloat16 by ") + (neon ? "BFDOT" : "VDPBF16PS");
  return text;
}

CHUNKATTN_ISA_NAMESPACE_END
