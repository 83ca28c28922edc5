// Steps: the interface of ./dev compare to a version of the library.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace compare {

inline constexpr int head_dim = 128;
inline constexpr int qo_heads = 32;

/// Of K and V. Queries are fp32 that are no bfloat16, but for `bf16_queries`.
enum class Type { fp32, bf16, bf16_one_term, bf16_queries, int8 };

struct Case {
  Type type;
  int kv_heads, sequences, shared, own;
  bool prefill = false;  ///< all tokens are computed, else one more of each sequence
};

inline std::size_t q_size(const Case& c) {
  const int rows = c.prefill ? c.shared + c.sequences * c.own : c.sequences;
  return static_cast<std::size_t>(rows) * qo_heads * head_dim;
}

/// Both versions compute on the same threads: with a pool each, that of one may sit on the core on
/// which the other's still waits for work.
class Threads {
 public:
  virtual ~Threads() = default;
  [[nodiscard]] virtual int concurrency() = 0;
  /// call(function, i) for each i in [0, n).
  virtual void run(int n, void (*call)(void* function, int i), void* function) = 0;

  template <class F>
  void parallel_for(int n, F&& f) {
    using Function = std::remove_reference_t<F>;
    run(
        n, [](void* function, int i) { (*static_cast<Function*>(function))(i); },
        const_cast<void*>(static_cast<const void*>(std::addressof(f))));
  }
};

/// Both versions read the same memory: where it lies makes no difference between them.
struct Memory {
  void *k, *v;
  std::size_t bytes;         ///< of each: as many layers as it has room for
  float *k_scale, *v_scale;  ///< of int8 rows
  const float* q;
  const void* q_bf16;
  float* out;  ///< its own
};

/// A decode step that can be repeated.
class Steps {
 public:
  virtual ~Steps() = default;
  /// Over K and V of some layer: where steps take different ones in turn, they are in no cache.
  virtual void run(int layer) = 0;
};

/// What the shared object exports.
using MakeSteps = Steps* (*)(const Case&, const Memory&, Threads&);
inline constexpr const char* make_steps_name = "make_steps";

}  // namespace compare
