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

TEST_CASE("a block of Q6_K has six bits from two fields and a scale for each sixteen") {
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

TEST_CASE("runs of Q4_K and Q5_K have scales and offsets of six bits from two fields") {
  test::Random random(2);
  Bytes scales(12), high(32), low(128);
  for (Bytes* bytes : {&scales, &high, &low})
    for (unsigned char& byte : *bytes) byte = static_cast<unsigned char>(random.uniform(0, 255));
  Bytes q4, q5;
  for (Bytes* bytes : {&q4, &q5}) {
    GgufWriter::put(*bytes, chunkattn::to_half(0.5f).bits);
    GgufWriter::put(*bytes, chunkattn::to_half(0.25f).bits);
    bytes->insert(bytes->end(), scales.begin(), scales.end());
  }
  q5.insert(q5.end(), high.begin(), high.end());
  for (Bytes* bytes : {&q4, &q5}) bytes->insert(bytes->end(), low.begin(), low.end());
  const auto fours = dequantised(TensorType::q4_k, 256, q4);
  const auto fives = dequantised(TensorType::q5_k, 256, q5);
  for (std::size_t e = 0; e < 256; ++e) {
    const std::size_t run = e / 32;
    unsigned scale = scales[run % 4], offset = scales[4 + run % 4];
    if (run < 4) {
      scale &= 63, offset &= 63;
    } else {
      scale = scale >> 6 << 4 | (scales[4 + run] & 15u);
      offset = offset >> 6 << 4 | scales[4 + run] >> 4;
    }
    const unsigned four = low[e / 64 * 32 + e % 32] >> (run % 2 * 4) & 15u;
    const unsigned five = four | (high[e % 32] >> run & 1u) << 4;
    const auto of = [&](unsigned number) {  // exact in floats
      return 0.5f * static_cast<float>(scale * number) - 0.25f * static_cast<float>(offset);
    };
    CHECK(fours[e] == of(four));
    CHECK(fives[e] == of(five));
  }
}

TEST_CASE("fifth bits, and nibbles that are names of values") {
  Bytes q5_0, q5_1, iq4;
  GgufWriter::put(q5_0, chunkattn::to_half(0.5f).bits);
  GgufWriter::put(q5_1, chunkattn::to_half(0.5f).bits);
  GgufWriter::put(q5_1, chunkattn::to_half(-3.0f).bits);
  GgufWriter::put(iq4, chunkattn::to_half(2.0f).bits);
  for (Bytes* bytes : {&q5_0, &q5_1}) GgufWriter::put(*bytes, std::uint32_t{0x8000'0101});
  for (int i = 0; i < 16; ++i)
    for (Bytes* bytes : {&q5_0, &q5_1, &iq4})
      bytes->push_back(static_cast<std::uint8_t>(i | (15 - i) << 4));
  constexpr int values[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};
  for (int i = 0; i < 32; ++i) {
    const int nibble = i < 16 ? i : 31 - i;
    const int five = nibble + (i == 0 || i == 8 || i == 31 ? 16 : 0);
    const auto at = static_cast<std::size_t>(i);
    CHECK(dequantised(TensorType::q5_0, 32, q5_0)[at] == 0.5f * static_cast<float>(five - 16));
    CHECK(dequantised(TensorType::q5_1, 32, q5_1)[at] == 0.5f * static_cast<float>(five) - 3);
    CHECK(dequantised(TensorType::iq4_nl, 32, iq4)[at] ==
          2.0f * static_cast<float>(values[nibble]));
  }
}

TEST_CASE("where half a head lies between the elements of a pair, they are brought together") {
  GgufWriter writer = test::tiny_gguf(true, {}, "qwen2");
  for (const char* block : {"blk.0.", "blk.1."}) {
    writer.floats(std::string(block) + "attn_q.bias", 16, 0, tiny_values(16, 50));
    writer.floats(std::string(block) + "attn_k.bias", 8, 0, tiny_values(8, 51));
    writer.floats(std::string(block) + "attn_v.bias", 8, 0, tiny_values(8, 52));
  }
  const Model model = load(writer.bytes());
  const Layer& layer = model.layers[0];
  constexpr std::size_t from[] = {0, 4, 1, 5, 2, 6, 3, 7};
  const auto q = tiny_values(16 * 16, 2), k = tiny_values(8 * 16, 3), v = tiny_values(8 * 16, 4);
  REQUIRE(layer.qkv_bias.size() == 32);
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(row(layer.qkv, i) == part(q, from[i], 16));
    CHECK(row(layer.qkv, 8 + i) == part(q, 8 + from[i], 16));
    CHECK(row(layer.qkv, 16 + i) == part(k, from[i], 16));
    CHECK(row(layer.qkv, 24 + i) == part(v, i, 16));
    CHECK(layer.qkv_bias[8 + i] == tiny_values(16, 50)[8 + from[i]]);
    CHECK(layer.qkv_bias[16 + i] == tiny_values(8, 51)[from[i]]);
    CHECK(layer.qkv_bias[24 + i] == tiny_values(8, 52)[i]);
  }
  CHECK(contains(refusal(test::tiny_gguf(true, {}, "qwen2").bytes()),
                 "tensor blk.0.attn_q.bias = not there"));
  CHECK(contains(refusal(test::tiny_gguf(true, {}, "qwen3").bytes()),
                 "tensor blk.0.attn_q_norm.weight = not there"));
  CHECK(contains(refusal(test::tiny_gguf(true, {}, "gemma3").bytes()),
                 "gemma3.attention.sliding_window = not there"));
}

TEST_CASE("layers have the window that the file says, if it is less than all") {
  const auto window_of = [](std::uint32_t window) {
    GgufWriter writer = test::tiny_gguf();
    writer.integer("llama.attention.sliding_window", window);
    return load(writer.bytes()).config;
  };
  CHECK(window_of(5).is_local(0));
  CHECK(window_of(5).window == 5);
  CHECK_FALSE(window_of(64).is_local(0));
  CHECK_FALSE(window_of(0).is_local(1));
  Config gemma;
  gemma.window = 512;
  gemma.global_every = 6;
  for (int layer = 0; layer < 20; ++layer)
    CHECK(gemma.is_local(layer) == (layer != 5 && layer != 11 && layer != 17));
}

TEST_CASE("a model in several files is one model, and one that lacks a file is none") {
  const auto part_file = [](GgufWriter writer, std::uint32_t number, std::uint32_t count) {
    writer.integer("split.no", number);
    writer.integer("split.count", count);
    return writer.bytes();
  };
  const auto name = [](const char* ending) { return std::string("split-0000") + ending + ".gguf"; };
  GgufWriter rest;
  rest.floats("output.weight", 16, 9, tiny_values(9 * 16, 20));
  const test::TemporaryFile first(name("1-of-00002")), second(name("2-of-00002"));
  const auto said = [](const std::string& path) -> std::string {
    try {
      (void)load_gguf(Gguf(path), Element::fp32, pool());
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  };
  first.write(part_file(test::tiny_gguf(true), 0, 2));
  CHECK(contains(said(first.path()), "00002-of-00002.gguf: cannot be opened"));
  second.write(part_file(rest, 1, 2));
  const Model model = load_gguf(Gguf(first.path()), Element::fp32, pool());
  const Model whole = load(test::tiny_gguf(false).bytes());
  CHECK_FALSE(model.config.tied);
  for (std::size_t o = 0; o < 9; ++o)
    CHECK(row(model.classifier(), o) == row(whole.classifier(), o));
  CHECK(contains(said(second.path()), "split.no = 1: expected 0: the first of the 2 files"));
  second.write(part_file(rest, 1, 3));
  CHECK(contains(said(first.path()), "split.no = 1: expected 1 of 2"));
  second.write(part_file(test::tiny_gguf(true), 1, 2));
  CHECK(contains(said(first.path()), "in two of the files"));
  const test::TemporaryFile alone("other.gguf");
  alone.write(part_file(test::tiny_gguf(true), 0, 2));
  CHECK(
      contains(said(alone.path()), "name = another: expected one that ends with -00001-of-00002"));
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

TEST_CASE("bytes behind the last tensor belong to nobody") {
  Bytes longer = test::tiny_gguf().bytes();
  for (const std::size_t more : {1u, 32u, 5000u}) {
    longer.resize(longer.size() + more, 0xff);
    CHECK(refusal(longer).empty());
  }
}

TEST_CASE("what is foreign or contradictory is refused by its field") {
  const Bytes good = test::tiny_gguf().bytes();
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
  CHECK(contains(said([](GgufWriter& w) { w.tensor("x", 9, 32, 0, Bytes(40)); }),
                 "tensor x (type) = 9: expected F32"));
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
      "blk.1.attn_q.bias = there: expected none of this name in a model of architecture llama"));
  CHECK(contains(said([](GgufWriter& w) { w.real("llama.attn_logit_softcapping", 50); }),
                 "llama.attn_logit_softcapping = 50.000000: expected none"));
  CHECK(contains(said([](GgufWriter& w) { w.integer("llama.attention.key_length", 7); }),
                 "an even number"));

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
