// Products of activations with weights: nearly all of a model's work outside attention.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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
/// each number of rows that it is called with, so there are few of them.
[[nodiscard]] constexpr std::size_t row_room(std::size_t rows) {
  std::size_t room = 1;
  while (room < rows && room < 64) room *= 2;
  return (rows + room - 1) / room * room;
}

namespace detail {

/// Some outputs of one product, for one thread.
struct ProductCall {
  std::size_t rows;
  std::size_t inputs;      ///< of rows of x and of weights, zeros at their ends included
  std::size_t outputs;     ///< that are wanted
  std::size_t out_stride;  ///< elements between rows of out
  Element element;         ///< of weights
  const void* x;           ///< [rows][inputs]: floats; for oneDNN elements like the weights'
  const void* weights;     ///< [outputs][inputs]
  float* out;
};

/// Does it on the calling thread. May throw where it has no such product.
using Multiply = void (*)(const ProductCall& call);
void own_product(const ProductCall& call);
#if defined(SERVE_HAVE_ONEDNN)
void onednn_product(const ProductCall& call);
#endif

}  // namespace detail

class Products {
 public:
  /// \param ranks  that each multiply with a part of the model
  /// \pre kind is own, or built_with_onednn
  Products(chunkattn::ThreadPool& executor, ProductKind kind, Communicator& ranks = alone());
  /// With another implementation instead of oneDNN, for tests.
  Products(chunkattn::ThreadPool& executor, detail::Multiply onednn)
      : executor_(executor), onednn_(onednn), ranks_(alone()) {}

  [[nodiscard]] chunkattn::ThreadPool& executor() const { return executor_; }
  [[nodiscard]] Communicator& ranks() const { return ranks_; }

  /// Tries the products of a layer and of the classifier, and from then on does by other means what
  /// is refused: oneDNN 2 has none in bf16 on processors without AVX-512. Returns a line that says
  /// so; empty where all is as asked for.
  [[nodiscard]] std::string try_out(const Model& model);

  /// out[r][o] = sum over i of x[r][i] * weights[o][i], for r < rows.
  /// \param x    [row_room(rows)][weights.stride()], zeros after the inputs
  /// \param out  [row_room(rows)][weights.outputs()]; rows after `rows` are unspecified
  void run(std::span<const float> x, std::size_t rows, const Matrix& weights, std::span<float> out);

 private:
  [[nodiscard]] std::string refusal(const Matrix& weights);

  chunkattn::ThreadPool& executor_;
  detail::Multiply onednn_ = nullptr;  // none: ours
  bool widens_ = false;                // bf16 weights, for oneDNN in fp32
  Communicator& ranks_;
  std::vector<std::uint16_t> rounded_;  // x in bf16
};

}  // namespace serve
