// Products: right within their rounding, and ours the same bits for a row in any company.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "model/products.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

Matrix random_matrix(std::size_t outputs, std::size_t inputs, Element element,
                     test::Random& random) {
  Matrix matrix(outputs, inputs, element);
  std::vector<float> row(inputs);
  for (std::size_t o = 0; o < outputs; ++o) {
    random.fill<float>(row);
    matrix.set(o, row);
  }
  return matrix;
}

/// Activations as products want them: with zeros behind the inputs.
std::vector<float> random_input(std::size_t rows, const Matrix& matrix, test::Random& random) {
  std::vector<float> x(row_room(rows) * matrix.stride());
  for (std::size_t r = 0; r < rows; ++r)
    random.fill<float>(std::span(x).subspan(r * matrix.stride(), matrix.inputs()));
  return x;
}

std::vector<float> product(chunkattn::ThreadPool& pool, ProductKind kind, std::size_t rows,
                           std::span<const float> x, const Matrix& matrix) {
  Products products(pool, kind);
  std::vector<float> out(row_room(rows) * matrix.outputs());
  products.run(x, rows, matrix, out);
  out.resize(rows * matrix.outputs());
  return out;
}

}  // namespace

TEST_CASE("products are right within what they round to") {
  test::Random random(1);
  chunkattn::ThreadPool pool(2);
  for (const ProductKind kind : {ProductKind::own, ProductKind::onednn}) {
    if (kind == ProductKind::onednn && !built_with_onednn) {
      std::printf("skipped: built without oneDNN\n");
      continue;
    }
    for (const Element element : {Element::fp32, Element::bf16})
      for (int round = 0; round < test::scaled(20); ++round) {
        const auto inputs = static_cast<std::size_t>(random.uniform(1, 200));
        const auto outputs = static_cast<std::size_t>(random.uniform(1, 300));
        const auto rows = static_cast<std::size_t>(random.uniform(1, 70));
        const Matrix matrix = random_matrix(outputs, inputs, element, random);
        const auto x = random_input(rows, matrix, random);
        const auto out = product(pool, kind, rows, x, matrix);
        // oneDNN rounds activations to bf16 where the weights are: 2^-9 of each factor.
        const bool rounds = kind == ProductKind::onednn && element == Element::bf16;
        const double relative = (rounds ? 0x1p-8 : 0) + static_cast<double>(inputs) * 0x1p-24;
        double worst = 0;
        std::vector<float> weights(inputs);
        for (std::size_t o = 0; o < outputs; ++o) {
          matrix.get(o, weights);
          for (std::size_t r = 0; r < rows; ++r) {
            double exact = 0, sizes = 0;
            for (std::size_t i = 0; i < inputs; ++i) {
              const double one = double(x[r * matrix.stride() + i]) * double(weights[i]);
              exact += one;
              sizes += std::abs(one);
            }
            worst = std::max(worst, std::abs(out[r * outputs + o] - exact) / (relative * sizes));
          }
        }
        CHECK(worst <= 1);
      }
  }
}

TEST_CASE("a row's bits do not depend on how many rows there are, or threads") {
  test::Random random(2);
  chunkattn::ThreadPool one(1), two(2);
  for (const Element element : {Element::fp32, Element::bf16}) {
    const Matrix matrix = random_matrix(331, 576, element, random);
    const auto x = random_input(64, matrix, random);
    const auto all = product(two, ProductKind::own, 64, x, matrix);
    for (std::size_t rows = 1; rows <= 64; ++rows) {
      const auto some = product(rows % 2 == 0 ? one : two, ProductKind::own, rows, x, matrix);
      CHECK(std::memcmp(some.data(), all.data(), some.size() * sizeof(float)) == 0);
      // The last row alone, which stood anywhere among the others.
      const std::span<const float> last =
          std::span(x).subspan((rows - 1) * matrix.stride(), matrix.stride());
      const auto alone = product(one, ProductKind::own, 1, last, matrix);
      CHECK(std::memcmp(alone.data(), all.data() + (rows - 1) * matrix.outputs(),
                        alone.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("rows are padded to few numbers, never to fewer") {
  for (std::size_t rows = 1; rows < 1000; ++rows) {
    CHECK(row_room(rows) >= rows);
    CHECK(row_room(rows) < 2 * rows + (rows > 64 ? 64 : 0));
    CHECK(row_room(row_room(rows)) == row_room(rows));
  }
}
