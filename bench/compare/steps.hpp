// What ./dev compare asks of each version of the library.
#pragma once

#include <cstddef>

namespace compare {

inline constexpr int head_dim = 128;
inline constexpr int qo_heads = 32;

/// Of K and V. Queries are fp32 that are no bfloat16, but for `bf16_queries`.
enum class Type { fp32, bf16, bf16_one_term, bf16_queries, int8 };

struct Case {
  Type type;
  int kv_heads, sequences, shared, own;
};

inline std::size_t q_size(const Case& c) {
  return static_cast<std::size_t>(c.sequences) * qo_heads * head_dim;
}

/// Both versions read the same memory: where it lies makes no difference between them.
struct Memory {
  void *k, *v;
  float *k_scale, *v_scale;  ///< of int8 rows
  const float* q;
  const void* q_bf16;
  float* out;  ///< its own
};

/// A decode step that can be repeated.
class Steps {
 public:
  virtual ~Steps() = default;
  virtual void run() = 0;
};

/// What the shared object exports.
using MakeSteps = Steps* (*)(const Case&, const Memory&);
inline constexpr const char* make_steps_name = "make_steps";

}  // namespace compare
