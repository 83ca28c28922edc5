// 8-bit K and V: where rows and scales lie, with and without slabs; rounding; what a view refuses.

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "chunkattn/kv_view.hpp"
#include "support/random.hpp"

using namespace chunkattn;

TEST_CASE("a dense view: rows and scales one after the other, heads within chunks") {
  constexpr int chunks = 5, heads = 3, chunk_size = 4, dim = 8;
  std::vector<std::int8_t> k(std::size_t{chunks} * heads * chunk_size * dim), v(k.size());
  std::vector<float> k_scale(std::size_t{chunks} * heads * chunk_size), v_scale(k_scale.size());
  const auto view = make_kv_view(k.data(), v.data(), k_scale.data(), v_scale.data(),
                                 {chunks, heads, chunk_size, dim});
  CHECK(view.num_chunks == chunks);
  CHECK(view.num_kv_heads == heads);
  CHECK(view.chunk_size == chunk_size);
  CHECK(view.head_dim == dim);
  std::ptrdiff_t row = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int head = 0; head < heads; ++head) {
      for (int token = 0; token < chunk_size; ++token, ++row) {
        CHECK(view.k_row(chunk, head, token) - k.data() == row * dim);
        CHECK(view.v_row(chunk, head, token) - v.data() == row * dim);
        CHECK(view.k_row_scale(chunk, head, token) - k_scale.data() == row);
        CHECK(view.v_row_scale(chunk, head, token) - v_scale.data() == row);
      }
    }
  }
}

TEST_CASE("a view in slabs: each chunk in its slab, with strides of the engine's own") {
  constexpr int slabs = 3, shift = 1, chunks = slabs << shift;
  std::vector<std::vector<std::int8_t>> memory(2 * slabs, std::vector<std::int8_t>(400));
  std::vector<std::vector<float>> scales(2 * slabs, std::vector<float>(100));
  std::vector<std::int8_t*> k_slabs, v_slabs;
  std::vector<float*> k_scale_slabs, v_scale_slabs;
  for (std::size_t s = 0; s < slabs; ++s) {
    k_slabs.push_back(memory[s].data());
    v_slabs.push_back(memory[slabs + s].data());
    k_scale_slabs.push_back(scales[s].data());
    v_scale_slabs.push_back(scales[slabs + s].data());
  }
  KvView<std::int8_t> view;
  view.k_slabs = k_slabs.data();
  view.v_slabs = v_slabs.data();
  view.k_scale_slabs = k_scale_slabs.data();
  view.v_scale_slabs = v_scale_slabs.data();
  view.slab_shift = shift;
  view.head_dim = 8;
  view.stride_chunk = 200;
  view.stride_head = 60;
  view.stride_token = 10;
  view.scale_stride_chunk = 50;
  view.scale_stride_head = 20;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const auto slab = static_cast<std::size_t>(chunk / 2);
    const int within = chunk % 2;
    for (int head = 0; head < 3; ++head) {
      for (int token = 0; token < 5; ++token) {
        const int at = within * 200 + head * 60 + token * 10,
                  scale = within * 50 + head * 20 + token;
        CHECK(view.k_row(chunk, head, token) == k_slabs[slab] + at);
        CHECK(view.v_row(chunk, head, token) == v_slabs[slab] + at);
        CHECK(view.k_row_scale(chunk, head, token) == k_scale_slabs[slab] + scale);
        CHECK(view.v_row_scale(chunk, head, token) == v_scale_slabs[slab] + scale);
      }
    }
  }
}

TEST_CASE("quantize_row stores so many elements, to nearest even, and no more") {
  std::int8_t stored[9];
  for (std::int8_t& value : stored) value = 99;
  const float row[9] = {127, -127, 1.5f, 2.5f, -0.5f, 0, 126.4f, -3, 500};
  CHECK(quantize_row(row, 8, stored) == 1.0f);
  const std::vector<int> expected{127, -127, 2, 2, 0, 0, 126, -3, 99};
  for (std::size_t i = 0; i < 9; ++i) CHECK(stored[i] == expected[i]);
  CHECK(quantize_row(row + 5, 1, stored + 8) == 0.0f);
  CHECK(stored[8] == 0);
  const float negative[2] = {0.5f, -2.0f};  // the largest magnitude is a negative one
  CHECK(quantize_row(negative, 2, stored) == 2.0f / 127);
  CHECK(stored[0] == 32);
  CHECK(stored[1] == -127);
}

TEST_CASE_TEMPLATE("the smallest values: no scale is subnormal, none makes an infinity", T,
                   std::int8_t, float8_e4m3) {
  const auto value = [](T stored) {
    if constexpr (std::is_same_v<T, float8_e4m3>)
      return to_float(stored);
    else
      return static_cast<float>(stored);
  };
  const float unit = std::numeric_limits<float>::min();  // 2^-126, the smallest scale
  for (const float largest : {3.0f, 96.0f, detail::largest_stored<T>}) {
    const float row[4] = {largest * unit, -2 * unit, unit / 8, 0};
    T stored[4] = {};
    CHECK(quantize_row(row, 4, stored) == unit);
    CHECK(value(stored[0]) == largest);
    CHECK(value(stored[1]) == -2);
    CHECK(value(stored[2]) == (std::is_same_v<T, std::int8_t> ? 0 : 0.125f));
    CHECK(value(stored[3]) == 0);
  }
  // Far below: everything is nearest to zero.
  const float row[2] = {std::numeric_limits<float>::denorm_min(), -0x1p-140f};
  T stored[2] = {};
  CHECK(quantize_row(row, 2, stored) == unit);
  CHECK(value(stored[0]) == 0);
  CHECK(value(stored[1]) == 0);
}

TEST_CASE("rows of zeros and of what is no number store zeros, in their rows alone") {
  const float zeros[3] = {0, -0.0f, 0};
  const float broken[3] = {1, std::numeric_limits<float>::infinity(), 2};
  for (const float* row : {zeros, broken}) {
    std::int8_t stored[5] = {99, 99, 99, 99, 99};
    const float scale = quantize_row(row, 3, stored + 1);
    CHECK((row == zeros ? scale == 0 : std::isnan(scale)));
    const std::vector<int> expected{99, 0, 0, 0, 99};
    for (std::size_t i = 0; i < 5; ++i) CHECK(stored[i] == expected[i]);
  }
}

TEST_CASE("the oracle's rows are scale times integer") {
  std::int8_t k[2][8], v[2][8];
  for (int t = 0; t < 2; ++t) {
    for (int i = 0; i < 8; ++i) {
      k[t][i] = static_cast<std::int8_t>(10 * t + i);
      v[t][i] = static_cast<std::int8_t>(-10 * t - i);
    }
  }
  float k_scale[2] = {1, 0.5f}, v_scale[2] = {2, 0.25f};
  const auto view = make_kv_view(k[0], v[0], k_scale, v_scale, {1, 1, 2, 8});
  double row[9] = {};
  row[8] = -1;
  detail::load_row(view, false, 0, 0, 1, row);
  CHECK(row[0] == 5.0);
  CHECK(row[7] == 8.5);
  detail::load_row(view, true, 0, 0, 1, row);
  CHECK(row[0] == -2.5);
  CHECK(row[7] == -4.25);
  CHECK(row[8] == -1.0);
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("a view names what is missing") {
  std::int8_t k = 0, v = 0;
  float k_scale = 0, v_scale = 0;
  const auto message = [&](std::int8_t* of_k, std::int8_t* of_v, float* of_k_scale,
                           float* of_v_scale, int chunks, int heads, int chunk_size, int dim) {
    try {
      static_cast<void>(
          make_kv_view(of_k, of_v, of_k_scale, of_v_scale, {chunks, heads, chunk_size, dim}));
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      return text.substr(0, text.find(" ="));
    }
    return std::string();
  };
  CHECK(message(&k, &v, &k_scale, &v_scale, 1, 1, 1, 1) == "");
  CHECK(message(&k, &v, &k_scale, &v_scale, 0, 1, 1, 1) == "");  // an empty cache
  CHECK(message(nullptr, &v, &k_scale, &v_scale, 1, 1, 1, 1) == "k");
  CHECK(message(&k, nullptr, &k_scale, &v_scale, 1, 1, 1, 1) == "v");
  CHECK(message(&k, &v, nullptr, &v_scale, 1, 1, 1, 1) == "k_scale");
  CHECK(message(&k, &v, &k_scale, nullptr, 1, 1, 1, 1) == "v_scale");
  CHECK(message(&k, &v, &k_scale, &v_scale, -1, 1, 1, 1) == "geometry.num_chunks");
  CHECK(message(&k, &v, &k_scale, &v_scale, 1, 0, 1, 1) == "geometry.num_kv_heads");
  CHECK(message(&k, &v, &k_scale, &v_scale, 1, 1, 0, 1) == "geometry.chunk_size");
  CHECK(message(&k, &v, &k_scale, &v_scale, 1, 1, 1, 0) == "geometry.head_dim");
}
#endif
