// Attention on a GPU for programs that keep everything else on the host: float arrays in, float
// arrays out. What it does is compiled by nvcc in cuda_attention.cu; CMake defines
// CHUNKATTN_EXAMPLES_CUDA where that file is part of the program.
#pragma once

#include <chunkattn/plan_view.hpp>
#include <cstddef>
#include <memory>
#include <span>

namespace examples {

/// The attention of a model as its configuration has it.
struct CudaShape {
  int num_layers = 1, num_qo_heads = 0, num_kv_heads = 0, head_dim = 0;
  int chunk_size = 0;  ///< of the tree
  int max_rows = 0;    ///< query tokens of one step
};

/// All layers over one K/V cache in device memory; K, V, Q and O in fp16 there. Heads are padded
/// with zeros to the next size the kernels have. Throws chunkattn::DeviceError where a call of the
/// CUDA runtime fails.
class CudaAttention {
 public:
  virtual ~CudaAttention() = default;
  /// Stores k and v [rows][num_kv_heads][head_dim]. \param num_chunks  of the tree, at this moment
  virtual void write(int layer, const chunkattn::LiveView& plan, std::size_t num_chunks,
                     std::span<const float> k, std::span<const float> v) = 0;
  /// q, out: [rows][num_qo_heads][head_dim]. \param share  false: every row reads its whole path by
  /// itself, as over pages. Returns the milliseconds from the first launch to the last result, on
  /// the host's clock, without the copies from and to the host.
  virtual double run(int layer, const chunkattn::LiveView& plan, std::span<const float> q,
                     std::span<float> out, bool share = true) = 0;
};

#if defined(CHUNKATTN_EXAMPLES_CUDA)
inline constexpr bool built_with_cuda = true;
/// \throws chunkattn::DeviceError without a GPU, std::invalid_argument for heads above 128
std::unique_ptr<CudaAttention> make_cuda_attention(const CudaShape& shape);
#else
inline constexpr bool built_with_cuda = false;
inline std::unique_ptr<CudaAttention> make_cuda_attention(const CudaShape&) {
  return nullptr;
}
#endif
/// What to say to `--device cuda` where the program has no CUDA code.
inline constexpr const char* no_cuda_message =
    "--device = cuda: this program was built without CUDA: configure it again where nvcc is found";

}  // namespace examples
