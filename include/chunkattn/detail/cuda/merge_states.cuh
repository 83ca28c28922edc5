// merge_states() on a device: results over disjoint sets of tokens become one, a warp for each
// query head of a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../attention/merge_head.hpp"
#include "merge.cuh"
#include "runtime.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

inline constexpr int merge_threads = 128;

template <class T>
struct MergeStatesArguments {
  const T* outs;      ///< [num_states][lines][head_dim]
  const float* lses;  ///< [num_states][lines]
  T* out;             ///< [lines][head_dim]; may be one of the states
  float* lse;         ///< [lines]; may be that state's
  std::int64_t lines;
  std::int32_t num_states, head_dim;
  float to_base2 = 1, from_base2 = 1;  ///< factors of an lse: its base may be another
};

template <class T>
CHUNKATTN_KERNEL merge_states_kernel(const MergeStatesArguments<T> args) {
  constexpr int warps = merge_threads / 32;
  const int lane = ptx::thread_index() % 32;
  std::int64_t line = std::int64_t{ptx::block_index()} * warps + ptx::thread_index() / 32;
  for (; line < args.lines; line += std::int64_t{ptx::grid_size()} * warps) {
    const auto lse_of = [&](int state) { return args.lses[state * args.lines + line]; };
    SoftmaxTotal total;
    for (int s = 0; s < args.num_states; ++s)
      if (const float lse = lse_of(s); !is_empty_lse(lse))
        (void)total.add({lse * args.to_base2, 1.0f});
    const SoftmaxState all = total.state();
    const float scale = normaliser(all);
    for (int column = lane; column < args.head_dim; column += 32) {
      ExactSum sum;
      for (int s = 0; s < args.num_states; ++s) {
        const float lse = lse_of(s);
        if (is_empty_lse(lse)) continue;
        const float weight = ptx::exp2(lse * args.to_base2 - all.max) * scale;
        sum.add(1.0f, to_float(args.outs[(s * args.lines + line) * args.head_dim + column]),
                weight);
      }
      args.out[line * args.head_dim + column] = from_float<T>(sum.value());
    }
    (void)ptx::any(all.max >
                   0.0f);  // all lanes have read the states' lse, which may be written now
    const float lse2 = log_sum_exp<Base2>(all);
    if (lane == 0) args.lse[line] = all.empty() ? lse2 : lse2 * args.from_base2;
  }
}

template <bool Natural, class T>
void merge_on_device(MergeStatesArguments<T> arguments, cudaStream_t stream) {
  if (Natural) {
    arguments.to_base2 = 1.4426950408889634f;
    arguments.from_base2 = 0.6931471805599453f;
  }
  constexpr int warps = merge_threads / 32;
  const std::int64_t blocks =
      (std::min<std::int64_t>)((arguments.lines + warps - 1) / warps, 1 << 16);
  launch("merge_states_kernel", &merge_states_kernel<T>, static_cast<int>(blocks), merge_threads, 0,
         stream, arguments);
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
