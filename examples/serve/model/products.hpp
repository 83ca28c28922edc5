// Products of activations with weights: nearly all of a model's work outside attention.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../ranks/communicator.hpp"
#include "model.hpp"

namespace serve {

/// Who multiplies. Both work on the threads of the pool and start none of their own.
enum class ProductKind {
  /// Code of ours, in fp32 arithmetic. Each result is summed over the inputs in one order, whatever
  /// the number of rows: a row's bits do not depend on what else is in the step.
  own,
  /// oneDNN, which knows the matrix units of processors; with bf16 weights the activations are
  /// rounded to bf16, too. The order of its sums may change with the number of rows.
  onednn
};

#if defined(SERVE_HAVE_ONEDNN)
inline constexpr bool built_with_onednn = true;
#else
inline constexpr bool built_with_onednn = false;
#endif

/// Rows that buffers of activations have room for where a step has `rows`. oneDNN makes code for
/// each number of rows that it meets, so it meets few of them.
[[nodiscard]] constexpr std::size_t row_room(std::size_t rows) {
  std::size_t room = 1;
  while (room < rows && room < 64) room *= 2;
  return (rows + room - 1) / room * room;
}

class Products {
 public:
  /// \param ranks  that each multiply with a part of the model
  /// \pre kind is own, or built_with_onednn
  Products(chunkattn::ThreadPool& executor, ProductKind kind, Communicator& ranks = alone())
      : executor_(executor), kind_(kind), ranks_(ranks) {}

  [[nodiscard]] chunkattn::ThreadPool& executor() const { return executor_; }
  [[nodiscard]] Communicator& ranks() const { return ranks_; }

  /// out[r][o] = sum over i of x[r][i] * weights[o][i], for r < rows.
  /// \param x    [row_room(rows)][weights.stride()], zeros behind the inputs
  /// \param out  [row_room(rows)][weights.outputs()]; rows behind `rows` are left as anything
  void run(std::span<const float> x, std::size_t rows, const Matrix& weights, std::span<float> out);

 private:
  chunkattn::ThreadPool& executor_;
  ProductKind kind_;
  Communicator& ranks_;
  std::vector<std::uint16_t> rounded_;  // x in bf16
};

namespace detail {

/// One call of a product.
struct ProductCall {
  const float* x;
  std::size_t rows;
  const Matrix* weights;
  float* out;
};

/// Outputs [begin, end) of a product, on the calling thread.
void own_product(const ProductCall& call, std::size_t begin, std::size_t end);
#if defined(SERVE_HAVE_ONEDNN)
/// \param rounded  x in bf16 where the weights are
void onednn_product(const ProductCall& call, const std::uint16_t* rounded, std::size_t begin,
                    std::size_t end);
#endif

}  // namespace detail

}  // namespace serve
