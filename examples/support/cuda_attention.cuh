// CudaAttention for one padded head size: pads, converts, copies, launches.
#pragma once

#include <chrono>
#include <chunkattn/cuda.cuh>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_attention.hpp"

namespace examples {

inline void check_cuda(cudaError_t result, const char* call) {
  if (result != cudaSuccess)
    throw chunkattn::DeviceError(call, static_cast<int>(result), cudaGetErrorString(result));
}

/// fp16 lines of `padded` elements in device memory; the host has them as `width` floats.
class DeviceLines {
 public:
  DeviceLines(std::size_t max_lines, int width, int padded)
      : width_(static_cast<std::size_t>(width)), padded_(static_cast<std::size_t>(padded)) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, max_lines * padded_ * sizeof(chunkattn::half)),
               "cudaMalloc(inputs and outputs)");
    data_ = static_cast<chunkattn::half*>(memory);
  }
  DeviceLines(const DeviceLines&) = delete;
  DeviceLines& operator=(const DeviceLines&) = delete;
  ~DeviceLines() { (void)cudaFree(data_); }

  [[nodiscard]] std::span<chunkattn::half> span(std::size_t lines) const {
    return {data_, lines * padded_};
  }
  [[nodiscard]] std::size_t lines(std::size_t floats) const { return floats / width_; }

  std::span<chunkattn::half> upload(std::span<const float> values) {
    const std::size_t count = lines(values.size());
    host_.assign(count * padded_, chunkattn::half{});  // zeros after every line
    for (std::size_t l = 0; l < count; ++l)
      for (std::size_t i = 0; i < width_; ++i)
        host_[l * padded_ + i] = chunkattn::to_half(values[l * width_ + i]);
    check_cuda(cudaMemcpy(data_, host_.data(), host_.size() * sizeof(chunkattn::half),
                          cudaMemcpyHostToDevice),
               "cudaMemcpy(to the device)");
    check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // it may still be copying
    return span(count);
  }
  void download(std::span<float> values) {
    const std::size_t count = lines(values.size());
    host_.resize(count * padded_);
    check_cuda(cudaMemcpy(host_.data(), data_, host_.size() * sizeof(chunkattn::half),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy(to the host)");
    for (std::size_t l = 0; l < count; ++l)
      for (std::size_t i = 0; i < width_; ++i)
        values[l * width_ + i] = chunkattn::to_float(host_[l * padded_ + i]);
  }

 private:
  std::size_t width_, padded_;
  chunkattn::half* data_ = nullptr;
  std::vector<chunkattn::half> host_;
};

template <int HeadDim>
class CudaAttentionOf final : public CudaAttention {
  using Kernels = chunkattn::ChunkAttention<chunkattn::Cuda, HeadDim>;

 public:
  explicit CudaAttentionOf(const CudaShape& shape)
      : shape_(shape),
        shared_(limits(shape), options(shape, true)),
        cache_(shape.chunk_size, {shape.num_layers, shape.num_kv_heads, HeadDim}),
        k_(lines(shape.max_rows, shape.num_kv_heads), shape.head_dim, HeadDim),
        v_(lines(shape.max_rows, shape.num_kv_heads), shape.head_dim, HeadDim),
        q_(lines(shape.max_rows, shape.num_qo_heads), shape.head_dim, HeadDim),
        out_(lines(shape.max_rows, shape.num_qo_heads), shape.head_dim, HeadDim) {
    check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate");
  }
  ~CudaAttentionOf() override { (void)cudaStreamDestroy(stream_); }

  void write(int layer, const chunkattn::LiveView& plan, std::size_t num_chunks,
             std::span<const float> k, std::span<const float> v) override {
    cache_.grow(num_chunks);
    shared_.write(cache_.layer(layer), plan, k_.upload(k), v_.upload(v), stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  double run(int layer, const chunkattn::LiveView& plan, std::span<const float> q,
             std::span<float> out, bool share) override {
    if (!share && paged_ == nullptr)
      paged_ = std::make_unique<Kernels>(limits(shape_), options(shape_, false));
    Kernels& kernels = share ? shared_ : *paged_;
    const auto device_q = q_.upload(q);
    kernels.prepare(plan, stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const auto start = std::chrono::steady_clock::now();
    kernels.run(cache_.layer(layer), plan, std::span<const chunkattn::half>(device_q),
                out_.span(out_.lines(out.size())), {.stream = stream_});
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    out_.download(out);
    return time.count();
  }

 private:
  static std::size_t lines(int rows, int heads) {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(heads);
  }
  static chunkattn::CudaOptions::Limits limits(const CudaShape& shape) {
    chunkattn::CudaOptions::Limits limits;
    limits.max_rows = shape.max_rows;
    limits.num_qo_heads = shape.num_qo_heads;
    limits.num_kv_heads = shape.num_kv_heads;
    limits.max_partial_rows = shape.max_rows + 1024;  // decode steps have few rows
    return limits;
  }
  // The scale is that of the model's heads; the zeros after them add nothing to q·k.
  static chunkattn::CudaOptions options(const CudaShape& shape, bool share) {
    chunkattn::CudaOptions options;
    options.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    if (!share) options.tuning.wait_ps = std::int64_t{1} << 50;
    return options;
  }

  CudaShape shape_;
  Kernels shared_;  // first: without a usable device it throws before anything else is made
  std::unique_ptr<Kernels> paged_;
  chunkattn::KvCache<chunkattn::Cuda, chunkattn::half> cache_;
  DeviceLines k_, v_, q_, out_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace examples
