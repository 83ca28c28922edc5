// What docs/cuda.md takes for granted: a tree, a stream, device memory. The device is the emulator,
// so that the page's code runs without a GPU.
#pragma once

#include <cstddef>
#include <cstdio>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "simt/runtime.hpp"
// After the fakes, which take the place of the CUDA runtime and of ptx.cuh.
#include "chunkattn/cuda.cuh"

using half = __half;  // as with cuda_fp16.h

template <class T>
std::span<T> device_memory(std::size_t count) {
  (void)simt::device();  // made first, it goes last
  static std::deque<chunkattn::detail::cuda::DeviceMemory> all;
  all.emplace_back(count * sizeof(T));
  return {reinterpret_cast<T*>(all.back().data()), count};
}

using Tree = chunkattn::PrefixTree<int, 64>;
constexpr std::size_t num_rows = 3;  // query tokens of the page's step: one short prompt

inline Tree tree;
inline const std::vector<int> prompt(num_rows, 8);  // of another sequence
inline std::vector<Tree::Sequence> make_running() {
  std::vector<Tree::Sequence> running;
  running.push_back(tree.insert(std::vector<int>(num_rows, 7)));
  return running;
}
inline auto running = make_running();
inline std::deque<Tree::InFlight> in_flight;
inline chunkattn::AttentionPlan plan;
inline simt::Stream fake_stream;
inline const cudaStream_t stream = &fake_stream;
inline const auto q = device_memory<chunkattn::half>(num_rows * 32 * 128);
inline const auto out = device_memory<chunkattn::half>(num_rows * 32 * 128);
inline const auto k = device_memory<chunkattn::half>(num_rows * 8 * 128);
inline const auto v = device_memory<chunkattn::half>(num_rows * 8 * 128);
inline const auto lse = device_memory<float>(num_rows * 32);
