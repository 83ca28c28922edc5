// GGUF files: what they say is what is loaded, and whatever is not such a file is refused with the
// field that is wrong.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "model/dequantise.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"
#include "tiny_gguf.hpp"

using namespace serve;
using test::Bytes;
using test::GgufWriter;
using test::tiny_values;

namespace {

chunkattn::ThreadPool& pool() {
  static chunkattn::ThreadPool one(1);
  return one;
}

Model load(const Bytes& bytes, Element element = Element::fp32) {
  const test::TemporaryFile file(bytes);
  return load_gguf(Gguf(file.path()), element, pool());
}

/// What is said of a file that is refused; empty for one that loads.
std::string refusal(const Bytes& bytes) {
  const test::TemporaryFile file(bytes);
  try {
    (void)load_gguf(Gguf(file.path()), Element::fp32, pool());
  } catch (const FileError& error) {
    const std::string text = error.what();
    CHECK(text.starts_with(file.path() + ": "));
    return text;
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<float> row(const Matrix& matrix, std::size_t output) {
  std::vector<float> weights(matrix.inputs());
  matrix.get(output, weights);
  return weights;
}

std::vector<float> part(const std::vector<float>& all, std::size_t r, std::size_t width) {
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(r * width);
  return {first, first + static_cast<std::ptrdiff_t>(width)};
}

std::vector<float> dequantised(TensorType type, std::size_t elements, const Bytes& bytes) {
  Tensor tensor{type, 1, elements, std::as_bytes(std::span(bytes))};
  std::vector<float> values(elements);
  dequantise(tensor, 0, values);
  return values;
}

}  // namespace

TEST_CASE("a file is loaded as its keys and tensors say") {
  for (const bool tied : {true, false})
    for (const Element element : {Element::fp32, Element::bf16}) {
      const Model model = load(test::tiny_gguf(tied).bytes(), element);
      const Config& c = model.config;
      CHECK(c.dim == 16);
      CHECK(c.hidden_dim == 24);
      CHECK(c.num_layers == 2);
      CHECK(c.num_qo_heads == 2);
      CHECK(c.num_kv_heads == 1);
      CHECK(c.vocab_size == 9);
      CHECK(c.max_positions == 64);
      CHECK(c.norm_eps == 1e-4f);
      CHECK(c.tied == tied);
      REQUIRE(model.rope_frequencies.size() == 4);
      for (int i = 0; i < 4; ++i)
        CHECK(model.rope_frequencies[static_cast<std::size_t>(i)] ==
              doctest::Approx(std::pow(500.0, -2.0 * i / 8)));
      // Tensors are numbered in the order in which tiny_gguf() writes them.
      CHECK(row(model.embedding, 3) == part(tiny_values(9 * 16, 0), 3, 16));
      CHECK(model.layers[0].attention_norm == tiny_values(16, 1));
      CHECK(row(model.layers[0].qkv, 5) == part(tiny_values(16 * 16, 2), 5, 16));
      CHECK(row(model.layers[0].qkv, 16 + 7) == part(tiny_values(8 * 16, 3), 7, 16));
      CHECK(row(model.layers[0].qkv, 24 + 1) == part(tiny_values(8 * 16, 4), 1, 16));
      CHECK(row(model.layers[1].out, 15) == part(tiny_values(16 * 16, 14), 15, 16));
      CHECK(row(model.layers[1].gate_up, 2) == part(tiny_values(24 * 16, 16), 2, 16));
      CHECK(row(model.layers[1].gate_up, 24 + 23) == part(tiny_values(24 * 16, 17), 23, 16));
      CHECK(row(model.layers[1].down, 9) == part(tiny_values(16 * 24, 18), 9, 24));
      CHECK(model.final_norm == tiny_values(16, 19));
      CHECK(row(model.classifier(), 8) == part(tiny_values(9 * 16, tied ? 0 : 20), 8, 16));
    }
}

TEST_CASE("rotary frequencies are scaled as the file says") {
  const std::vector<float> plain = load(test::tiny_gguf().bytes()).rope_frequencies;
  GgufWriter linear = test::tiny_gguf();
  linear.text("llama.rope.scaling.type", "linear");
  linear.real("llama.rope.scaling.factor", 4.0f);
  GgufWriter each = test::tiny_gguf();
  each.floats("rope_freqs.weight", 4, 0, {1, 2, 8, 32});
  const auto by_factor = load(linear.bytes()).rope_frequencies;
  const auto by_tensor = load(each.bytes()).rope_frequencies;
  constexpr float factors[] = {1, 2, 8, 32};
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(by_factor[i] == plain[i] / 4);
    CHECK(by_tensor[i] == plain[i] / factors[i]);
  }
  GgufWriter yarn = test::tiny_gguf();
  yarn.text("llama.rope.scaling.type", "yarn");
  CHECK(contains(refusal(yarn.bytes()), "llama.rope.scaling.type = yarn: expected none or linear"));
  GgufWriter zero = test::tiny_gguf();
  zero.floats("rope_freqs.weight", 4, 0, {1, 2, 0, 32});
  CHECK(contains(refusal(zero.bytes()), "rope_freqs.weight[2] = 0.000000: expected more than 0"));
}

TEST_CASE("each block format is read element by element") {
  const auto half = [](Bytes& to, float value) {
    GgufWriter::put(to, chunkattn::to_half(value).bits);
  };
  Bytes f16, bf16, q4_0, q4_1, q8_0;
  half(f16, -1.5f);
  GgufWriter::put(bf16, chunkattn::to_bfloat16(3.0f).bits);
  half(q4_0, 0.5f);
  half(q4_1, 0.5f), half(q4_1, -3.0f);
  for (int i = 0; i < 16; ++i) {
    const auto pair = static_cast<std::uint8_t>(i | (15 - i) << 4);
    q4_0.push_back(pair);
    q4_1.push_back(pair);
  }
  half(q8_0, 0.25f);
  for (int i = 0; i < 32; ++i) q8_0.push_back(static_cast<std::uint8_t>(i * 8 - 128));
  CHECK(dequantised(TensorType::f16, 1, f16)[0] == -1.5f);
  CHECK(dequantised(TensorType::bf16, 1, bf16)[0] == 3.0f);
  for (int i = 0; i < 32; ++i) {
    const int nibble = i < 16 ? i : 31 - i;
    const auto at = static_cast<std::size_t>(i);
    CHECK(dequantised(TensorType::q4_0, 32, q4_0)[at] == 0.5f * static_cast<float>(nibble - 8));
    CHECK(dequantised(TensorType::q4_1, 32, q4_1)[at] == 0.5f * static_cast<float>(nibble) - 3);
    CHECK(dequantised(TensorType::q8_0, 32, q8_0)[at] == 0.25f * static_cast<float>(i * 8 - 128));
  }
}

TEST_CASE("a block of Q6_K has six bits from two places and a scale for each sixteen") {
  test::Random random(1);
  Bytes bytes(208);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.uniform(0, 255));
  GgufWriter::put(bytes, chunkattn::to_half(0.125f).bits);
  const std::vector<float> values = dequantised(TensorType::q6_k, 256, bytes);
  for (std::size_t e = 0; e < 256; ++e) {
    const std::size_t in_half = e % 128, half = e / 128;
    const unsigned low = bytes[half * 64 + in_half % 64] >> (in_half / 64 * 4) & 15u;
    const unsigned high = bytes[128 + half * 32 + in_half % 32] >> (in_half / 32 * 2) & 3u;
    const auto scale = static_cast<std::int8_t>(bytes[192 + e / 16]);
    CHECK(values[e] == 0.125f * scale * (static_cast<float>(high * 16 + low) - 32));
  }
}

TEST_CASE("a file cut anywhere is refused") {
  const GgufWriter writer = test::tiny_gguf();
  const Bytes good = writer.bytes();
  REQUIRE(refusal(good).empty());
  std::vector<std::size_t> sizes = writer.boundaries();
  for (std::size_t at : writer.boundaries())  // and in the middle of what begins there
    for (const std::size_t more : {1u, 5u, 11u}) sizes.push_back(at + more);
  for (std::size_t tail = 1; tail <= 64; ++tail) sizes.push_back(good.size() - tail);
  for (const std::size_t size : sizes) {
    CAPTURE(size);
    if (size >= good.size()) continue;
    const std::string said =
        refusal(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    CHECK(contains(said, "truncated"));
  }
}

TEST_CASE("no flipped bit of the structure is read past, nor ends in anything but a word") {
  const GgufWriter writer = test::tiny_gguf();
  const Bytes good = writer.bytes();
  const std::size_t structure = writer.boundaries().back();
  int refused = 0;
  for (std::size_t at = 0; at < structure; ++at)
    for (int bit = 0; bit < 8; ++bit) {
      Bytes bytes = good;
      bytes[at] = static_cast<unsigned char>(bytes[at] ^ (1 << bit));
      refused += refusal(bytes).empty() ? 0 : 1;  // any other exception fails the test
    }
  CHECK(refused > static_cast<int>(structure));  // names and floats may change unnoticed
}

TEST_CASE("what is foreign, oversized or contradictory is refused by its field") {
  const Bytes good = test::tiny_gguf().bytes();
  Bytes longer = good;
  longer.resize(good.size() + 32);
  CHECK(contains(refusal(longer), "oversized"));
  Bytes magic = good, version = good, swapped = good;
  magic[0] = 'X';
  version[4] = 9;
  swapped[4] = 0, swapped[7] = 3;  // big-endian
  CHECK(contains(refusal(magic), "magic = other bytes: expected GGUF"));
  CHECK(contains(refusal(version), "version = 9: expected 2 or 3"));
  CHECK(contains(refusal(swapped), "version = 50331648"));
  CHECK(contains(refusal({}), "magic"));

  const auto said = [](const std::function<void(GgufWriter&)>& add) {
    GgufWriter writer = test::tiny_gguf();
    add(writer);
    return refusal(writer.bytes());
  };
  CHECK(contains(said([](GgufWriter& w) { w.integer("llama.block_count", 2); }),
                 "llama.block_count = given twice"));
  CHECK(contains(
      said([](GgufWriter& w) { w.floats("output_norm.weight", 16, 0, tiny_values(16, 0)); }),
      "tensor output_norm.weight = given twice"));
  CHECK(contains(said([](GgufWriter& w) { w.tensor("x", 7, 32, 0, Bytes(24)); }),
                 "tensor x (type) = 7: expected F32"));
  CHECK(contains(said([](GgufWriter& w) { w.tensor("x", 3, 33, 0, Bytes(40)); }),
                 "tensor x (first dimension) = 33: expected a multiple of 32"));
  CHECK(contains(said([](GgufWriter& w) { w.tensor("x", 0, 0, 0, {}); }),
                 "tensor x (first dimension) = 0: expected 1"));
  CHECK(contains(said([](GgufWriter& w) { w.tensor("x", 0, 1u << 30, 1u << 30, {}); }),
                 "tensor x = 4611686018427387904 bytes"));
  CHECK(contains(said([](GgufWriter& w) { w.floats("output.weight", 16, 8, tiny_values(128, 0)); }),
                 "tensor output.weight = [8][16]: expected [9][16]"));
  CHECK(contains(said([](GgufWriter& w) { w.integer("llama.expert_count", 8); }),
                 "llama.expert_count = 8"));
  CHECK(contains(said([](GgufWriter& w) { w.integer("general.alignment", 48); }),
                 "general.alignment = 48: expected a power of two"));
  CHECK(contains(
      said([](GgufWriter& w) { w.floats("blk.1.attn_q.bias", 16, 0, tiny_values(16, 0)); }),
      "blk.1.attn_q.bias = there: expected no biases"));

  GgufWriter other;
  other.text("general.architecture", "gemma");
  CHECK(contains(refusal(other.bytes()), "general.architecture = gemma: expected llama"));
  GgufWriter empty;
  empty.integer("general.architecture", 4);
  CHECK(contains(refusal(empty.bytes()), "general.architecture = of another type"));
}

TEST_CASE("SmolLM2 loads with the weights that its blocks stand for") {
  const std::string path = test::smollm2_file();
  if (path.empty()) return;
  const Gguf gguf(path);
  const Model model = load_gguf(gguf, Element::fp32, pool());
  CHECK(model.config.dim == 576);
  CHECK(model.config.num_layers == 30);
  CHECK(model.config.num_qo_heads == 9);
  CHECK(model.config.num_kv_heads == 3);
  CHECK(model.config.vocab_size == 49152);
  CHECK(model.config.tied);
  CHECK(model.config.rope_base == 100000.0f);
  const Tensor& q8 = gguf.tensor("token_embd.weight", 49152, 576);
  CHECK(q8.type == TensorType::q8_0);
  CHECK(gguf.tensor("blk.29.attn_v.weight", 192, 576).type == TensorType::q4_1);
  // The last weight of the embedding by hand: its block is the last of its tensor.
  const std::byte* block = q8.bytes.data() + q8.bytes.size() - 34;
  chunkattn::half scale;
  std::memcpy(&scale.bits, block, 2);
  CHECK(row(model.embedding, 49151)[575] ==
        chunkattn::to_float(scale) * static_cast<float>(static_cast<std::int8_t>(block[33])));
}
