// Products: right within their rounding, and ours the same bits for a row in any company.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "model/load.hpp"
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

/// Activations as products want them: with zeros after the inputs.
std::vector<float> random_input(std::size_t rows, const Matrix& matrix, test::Random& random) {
  std::vector<float> x(row_room(rows) * matrix.stride());
  for (std::size_t r = 0; r < rows; ++r)
    random.fill<float>(std::span(x).subspan(r * matrix.stride(), matrix.inputs()));
  return x;
}

Model tiny_model(Element element) {
  chunkattn::ThreadPool pool(1);
  return random_model({64, 172, 1, 8, 4, 300, 256, true, 1e-5f, 10000.0f}, element, 7, pool);
}

std::vector<float> product(chunkattn::ThreadPool& pool, ProductKind kind, std::size_t rows,
                           std::span<const float> x, const Matrix& matrix) {
  Products products(pool, kind);
  if (kind == ProductKind::onednn) (void)products.try_out(tiny_model(matrix.element()));
  std::vector<float> out(row_room(rows) * matrix.outputs());
  products.run(x, rows, matrix, out);
  out.resize(rows * matrix.outputs());
  return out;
}

// Instead of oneDNN: has products of these elements only, and counts them.
int num_fp32 = 0, num_bf16 = 0;
void only_fp32(const detail::ProductCall& call) {
  if (call.element == Element::bf16) throw std::runtime_error("no such primitive");
  ++num_fp32;
  detail::own_product(call);
}
void nothing(const detail::ProductCall&) {
  throw std::runtime_error("no such primitive");
}
void bf16_too(const detail::ProductCall& call) {
  ++(call.element == Element::bf16 ? num_bf16 : num_fp32);
  if (call.element == Element::fp32) return detail::own_product(call);
  std::vector<float> x(call.rows * call.inputs);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = chunkattn::to_float(chunkattn::bfloat16{static_cast<const std::uint16_t*>(call.x)[i]});
  detail::ProductCall widened = call;
  widened.x = x.data();
  detail::own_product(widened);
}
/// Refuses what is for several rows.
void single_rows(const detail::ProductCall& call) {
  if (call.rows > 1) throw std::runtime_error("one row at a time");
  detail::own_product(call);
}

}  // namespace

TEST_CASE("what oneDNN refuses when it is tried is done in fp32, or else by ours, and said") {
  test::Random random(3);
  chunkattn::ThreadPool pool(1);
  const Model bf16 = tiny_model(Element::bf16), fp32 = tiny_model(Element::fp32);
  Products whole(pool, bf16_too), some(pool, only_fp32), none(pool, nothing),
      odd(pool, single_rows);
  CHECK(whole.try_out(bf16).empty());
  CHECK(num_fp32 == 0);
  CHECK(std::exchange(num_bf16, 0) > 0);
  CHECK(some.try_out(bf16).find("in fp32, for in bf16 it refuses on this processor: no such") !=
        std::string::npos);
  CHECK(none.try_out(bf16).find("by serve itself") == 0);
  CHECK(odd.try_out(fp32).find("one row at a time") != std::string::npos);
  Products plain(pool, only_fp32);
  CHECK(plain.try_out(fp32).empty());

  // Of more weights than are widened at once, and of fewer than a vector's outputs.
  for (const std::size_t outputs : {7u, 331u, 1000u})
    for (const std::size_t inputs : {5u, 576u}) {
      const Matrix matrix = random_matrix(outputs, inputs, Element::bf16, random);
      for (const std::size_t rows : {1u, 2u, 70u}) {
        const auto x = random_input(rows, matrix, random);
        const auto expected = product(pool, ProductKind::own, rows, x, matrix);
        num_fp32 = 0;
        for (Products* products : {&some, &none, &whole}) {
          std::vector<float> out(row_room(rows) * outputs);
          products->run(x, rows, matrix, out);
          out.resize(rows * outputs);
          // The same products in the same order, but where activations are rounded.
          if (products != &whole) CHECK(out == expected);
        }
        CHECK((num_fp32 > 0) == (rows > 1));  // one row is read faster as it is
      }
    }
}

TEST_CASE("what this processor refuses is found when it is tried") {
  if (!built_with_onednn) {
    std::printf("skipped: built without oneDNN\n");
    return;
  }
  chunkattn::ThreadPool pool(2);
  for (const Element element : {Element::fp32, Element::bf16}) {
    const Model model = tiny_model(element);
    Products products(pool, ProductKind::onednn);
    const std::string said = products.try_out(model);
    CAPTURE(said);
    CHECK((said.empty() || element == Element::bf16));
    for (const std::size_t rows : {1u, 2u, 64u}) {
      const std::vector<float> x(row_room(rows) * model.classifier().stride());
      std::vector<float> out(row_room(rows) * model.classifier().outputs(), 1.0f);
      CHECK_NOTHROW(products.run(x, rows, model.classifier(), out));
      CHECK(out[rows * model.classifier().outputs() - 1] == 0);
    }
  }
}

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
