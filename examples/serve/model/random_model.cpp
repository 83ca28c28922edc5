#include <cmath>
#include <vector>

#include "load.hpp"

namespace serve {

namespace {

/// A generator that costs a few cycles a number: models of billions of weights are filled with it.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  /// Uniform in [-1, 1).
  float next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9u;
    z ^= z >> 27;
    return static_cast<float>(static_cast<std::int32_t>(z >> 16)) * 0x1p-31f;
  }

 private:
  std::uint64_t state_;
};

void fill(Matrix& matrix, std::uint64_t seed) {
  // Uniform in [-a, a) has a variance of a^2 / 3; outputs should vary as much as inputs do.
  const float largest = std::sqrt(3.0f / static_cast<float>(matrix.inputs()));
  Random random(seed);
  std::vector<float> weights(matrix.inputs());
  for (std::size_t o = 0; o < matrix.outputs(); ++o) {
    for (float& weight : weights) weight = largest * random.next();
    matrix.set(o, weights);
  }
}

}  // namespace

Model random_model(const Config& config, Element element, std::uint64_t seed,
                   chunkattn::ThreadPool& executor) {
  Model model = blank_model(config, element);
  std::vector<Matrix*> matrices{&model.embedding};
  if (!config.tied) matrices.push_back(&model.own_classifier);
  for (Layer& layer : model.layers)
    for (Matrix* matrix : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
      matrices.push_back(matrix);
  executor.parallel_for(static_cast<int>(matrices.size()), [&](int i) {
    fill(*matrices[static_cast<std::size_t>(i)], seed * 1000003 + static_cast<std::uint64_t>(i));
  });
  return model;
}

}  // namespace serve
