// llama2.c checkpoints, and shapes that come without weights.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "files.hpp"
#include "model/load.hpp"
#include "tests/support/nested_json.hpp"

using namespace serve;
using test::Bytes;

namespace {

Bytes checkpoint(const std::vector<std::int32_t>& header, std::size_t floats) {
  Bytes bytes(header.size() * 4 + floats * 4);
  std::memcpy(bytes.data(), header.data(), header.size() * 4);
  for (std::size_t i = 0; i < floats; ++i) {
    const auto value = static_cast<float>(i);
    std::memcpy(bytes.data() + header.size() * 4 + i * 4, &value, 4);
  }
  return bytes;
}

// dim 8, hidden 12, 2 layers, 4 heads, 2 KV heads, 10 pieces, 16 positions, head_dim 2
const std::vector<std::int32_t> tiny_header{8, 12, 2, 4, 2, 10, 16};
constexpr std::size_t tiny_floats =
    10 * 8 + 2 * 8 + 2 * 64 + 2 * 32 * 2 + 2 * 64 + 2 * 8 + 3 * 2 * 96 + 8 + 16 * 2;

std::string refusal(const Bytes& bytes) {
  const test::TemporaryFile file(bytes);
  try {
    (void)load_llama2c(file.path(), Element::fp32);
  } catch (const FileError& error) {
    CHECK(std::string(error.what()).starts_with(file.path() + ": not a llama2.c checkpoint: "));
    return error.what();
  }
  return "";
}

std::string shape_refusal(const std::string& json) {
  const test::TemporaryFile file;
  file.write(json);
  try {
    (void)read_shape(file.path());
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

float weight(const Matrix& matrix, std::size_t output, std::size_t input) {
  std::vector<float> row(matrix.inputs());
  matrix.get(output, row);
  return row[input];
}

}  // namespace

TEST_CASE("a checkpoint is read as its header says, each weight to its matrix") {
  const test::TemporaryFile file(checkpoint(tiny_header, tiny_floats));
  const Model model = load_llama2c(file.path(), Element::fp32);
  CHECK(model.config.dim == 8);
  CHECK(model.config.hidden_dim == 12);
  CHECK(model.config.num_layers == 2);
  CHECK(model.config.head_dim() == 2);
  CHECK(model.config.kv_dim() == 4);
  CHECK(model.config.vocab_size == 10);
  CHECK(model.config.max_positions == 16);
  CHECK(model.config.tied);
  CHECK(weight(model.embedding, 9, 7) == 79);
  std::size_t at = 80;  // where the next array of the file begins
  CHECK(model.layers[1].attention_norm[0] == static_cast<float>(at + 8));
  at += 16;
  CHECK(weight(model.layers[1].qkv, 0, 1) == static_cast<float>(at + 64 + 1));
  at += 128;
  CHECK(weight(model.layers[0].qkv, 8, 0) == static_cast<float>(at));
  at += 64;
  CHECK(weight(model.layers[0].qkv, 12, 0) == static_cast<float>(at));
  at += 64;
  CHECK(weight(model.layers[0].out, 1, 0) == static_cast<float>(at + 8));
  at += 128;
  CHECK(model.layers[0].ffn_norm[3] == static_cast<float>(at + 3));
  at += 16;
  CHECK(weight(model.layers[0].gate_up, 0, 0) == static_cast<float>(at));
  at += 192;
  CHECK(weight(model.layers[0].down, 1, 0) == static_cast<float>(at + 12));
  at += 192;
  CHECK(weight(model.layers[0].gate_up, 12, 0) == static_cast<float>(at));
  at += 192;
  CHECK(model.final_norm[0] == static_cast<float>(at));
  CHECK(&model.classifier() == &model.embedding);
}

TEST_CASE("a negative vocabulary size brings a classifier of its own") {
  std::vector<std::int32_t> header = tiny_header;
  header[5] = -10;
  const test::TemporaryFile file(checkpoint(header, tiny_floats + 80));
  const Model model = load_llama2c(file.path(), Element::fp32);
  CHECK(model.config.vocab_size == 10);
  CHECK_FALSE(model.config.tied);
  CHECK(weight(model.classifier(), 0, 0) == static_cast<float>(tiny_floats));
  CHECK(contains(refusal(checkpoint(header, tiny_floats)), "truncated"));
}

TEST_CASE("a file that is no checkpoint of this size is refused with the field") {
  CHECK(refusal(checkpoint(tiny_header, tiny_floats)) == "");
  CHECK(contains(refusal({}), "dim = 4 bytes from byte 0 on"));
  CHECK(contains(refusal(Bytes(27, 1)), "seq_len"));
  CHECK(contains(refusal(checkpoint(tiny_header, tiny_floats - 1)), "truncated"));
  CHECK(contains(refusal(checkpoint(tiny_header, 0)), "truncated"));
  CHECK(contains(refusal(checkpoint(tiny_header, tiny_floats + 1)), "oversized"));
  Bytes odd = checkpoint(tiny_header, tiny_floats);
  odd.push_back(0);
  CHECK(contains(refusal(odd), "oversized"));

  struct Case {
    int field;
    std::int32_t value;
    const char* said;
  };
  for (const Case& one :
       {Case{0, 0, "dim = 0"}, Case{0, -8, "dim = -8"}, Case{1, 0, "hidden_dim = 0"},
        Case{2, 0, "n_layers = 0"}, Case{3, 3, "n_heads = 3: expected a divisor of dim"},
        Case{3, 0, "n_heads = 0"}, Case{3, 8, "dim / n_heads = 1: expected an even"},
        Case{4, 3, "n_kv_heads = 3: expected a divisor"}, Case{4, 0, "n_kv_heads = 0"},
        Case{5, 0, "vocab_size = 0"}, Case{6, 0, "seq_len = 0"}, Case{6, -1, "seq_len = -1"},
        Case{5, -2147483647 - 1, "vocab_size = 0"}}) {
    std::vector<std::int32_t> header = tiny_header;
    header[static_cast<std::size_t>(one.field)] = one.value;
    CHECK(contains(refusal(checkpoint(header, tiny_floats)), one.said));
  }
  try {
    (void)load_llama2c("/nonexistent/model.bin", Element::fp32);
    FAIL("no error");
  } catch (const FileError& error) {
    CHECK(contains(error.what(), "/nonexistent/model.bin: cannot be opened"));
  }
}

TEST_CASE("shapes come by name or from a small JSON file") {
  const Config seven = read_shape("llama2-7b");
  CHECK(seven.head_dim() == 128);
  CHECK(seven.num_kv_heads == 32);
  CHECK(read_shape("llama3-8b").kv_dim() == 1024);
  const std::string good =
      R"({"dim": 16, "hidden_dim": 40, "num_layers": 1, "num_qo_heads": 2, "num_kv_heads": 1,)"
      R"( "vocab_size": 300, "max_positions": 32)";
  const test::TemporaryFile file;
  file.write(good + R"(, "rope_base": 5e5, "tied": false})");
  const Config config = read_shape(file.path());
  CHECK(config.rope_base == 5e5f);
  CHECK_FALSE(config.tied);
  CHECK(shape_refusal(good + "}").empty());
  CHECK(contains(shape_refusal("{\"dim\": 16}"), "key 'hidden_dim' not found"));
  CHECK(contains(shape_refusal(good + ", \"dim\": 1.5}"), "dim = 1.5: expected an integer"));
  CHECK(contains(shape_refusal(good + ", \"dim\": \"x\"}"), "type must be number"));
  CHECK(contains(shape_refusal(good + ", \"num_kv_heads\": 3}"),
                 "num_kv_heads = 3: expected a divisor"));
  CHECK(contains(shape_refusal(good + ", \"norm_eps\": 0}"), "epsilon = 0: expected more than 0"));
  CHECK(contains(shape_refusal("[1"), "JSON: parse error"));
  for (const std::string& nested : test::nested_json())
    CHECK(contains(shape_refusal(good + ", \"dim\": " + nested + "}"),
                   "JSON: nested more than 32 levels deep"));
  CHECK_THROWS_AS((void)read_shape("no-such-model"), FileError);
}

TEST_CASE("random weights keep the size of what they are multiplied with, and repeat") {
  chunkattn::ThreadPool pool(2);
  Config config{64, 96, 2, 4, 2, 300, 32, false, 1e-5f, 10000.0f};
  const Model model = random_model(config, Element::fp32, 7, pool);
  const Model again = random_model(config, Element::fp32, 7, pool);
  double squares = 0;
  for (std::size_t i = 0; i < 64; ++i) {
    std::vector<float> row(64), same(64);
    model.layers[1].out.get(i, row);
    again.layers[1].out.get(i, same);
    CHECK(row == same);
    for (const float value : row) squares += value * value;
  }
  CHECK(squares / 64 == doctest::Approx(1.0).epsilon(0.1));  // of each output, for inputs of 1
}
