// The llama example's own parts: checkpoint and tokenizer files, the forward pass, greedy sampling.
// The whole program over ChunkAttention is `llama --check`.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/llama/model.hpp"
#include "examples/llama/tokenizer.hpp"

namespace {

using Bytes = std::vector<unsigned char>;

std::string data_folder() {
  const char* folder = std::getenv("CHUNKATTN_DATA");
  return folder != nullptr ? folder : CHUNKATTN_SOURCE_DIR "/../shared";
}

/// False, with a message, where the optional model files are not at hand.
bool have_models() {
  const bool found = std::filesystem::exists(data_folder() + "/models/stories260K.bin") &&
                     std::filesystem::exists(data_folder() + "/models/tok512.bin");
  if (!found)
    std::printf(
        "skipped: no models/stories260K.bin and models/tok512.bin under %s; "
        "set CHUNKATTN_DATA\n",
        data_folder().c_str());
  return found;
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A file that is deleted at the end of the test.
class TemporaryFile {
 public:
  explicit TemporaryFile(const Bytes& bytes)
      : path_((std::filesystem::temp_directory_path() /
               ("chunkattn-llama-test-" + std::to_string(::getpid())))
                  .string()) {
    std::ofstream(path_, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

Bytes checkpoint_bytes(std::vector<std::int32_t> header, std::size_t floats) {
  Bytes bytes(header.size() * 4 + floats * 4);
  std::memcpy(bytes.data(), header.data(), header.size() * 4);
  for (std::size_t i = 0; i < floats; ++i) {
    const float value = static_cast<float>(i) * 0.001f;
    std::memcpy(bytes.data() + header.size() * 4 + i * 4, &value, 4);
  }
  return bytes;
}

// dim 8, hidden 12, 2 layers, 4 heads, 2 KV heads, 10 pieces, 16 positions, head_dim 2
const std::vector<std::int32_t> tiny_header{8, 12, 2, 4, 2, 10, 16};
constexpr std::size_t tiny_floats =
    10 * 8 + 2 * 8 + 2 * 64 + 2 * 32 * 2 + 2 * 64 + 2 * 8 + 3 * 2 * 96 + 8 + 16 * 2;

std::string load_failure(const Bytes& bytes) {
  const TemporaryFile file(bytes);
  try {
    (void)llama::load_checkpoint(file.path());
  } catch (const llama::FileError& error) {
    CHECK(std::string(error.what()).starts_with(file.path()));
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void append_piece(Bytes& bytes, const std::string& piece, float score) {
  const auto length = static_cast<std::int32_t>(piece.size());
  const std::size_t at = bytes.size();
  bytes.resize(at + 8 + piece.size());
  std::memcpy(bytes.data() + at, &score, 4);
  std::memcpy(bytes.data() + at + 4, &length, 4);
  std::memcpy(bytes.data() + at + 8, piece.data(), piece.size());
}

/// Plain attention over a cache of one sequence: what ChunkAttention is compared with.
class PlainAttention {
 public:
  explicit PlainAttention(const llama::Config& config)
      : config_(config), k_(static_cast<std::size_t>(config.num_layers)), v_(k_) {}

  void operator()(int layer, std::span<const float> q, std::span<const float> k,
                  std::span<const float> v, std::span<float> out) {
    auto& keys = k_[static_cast<std::size_t>(layer)];
    auto& values = v_[static_cast<std::size_t>(layer)];
    const std::size_t d = static_cast<std::size_t>(config_.head_dim());
    const std::size_t kv_dim = static_cast<std::size_t>(config_.kv_dim());
    const std::size_t dim = static_cast<std::size_t>(config_.dim);
    const std::size_t group = dim / kv_dim;
    for (std::size_t row = 0; row < q.size() / dim; ++row) {
      keys.insert(keys.end(), k.begin() + static_cast<std::ptrdiff_t>(row * kv_dim),
                  k.begin() + static_cast<std::ptrdiff_t>((row + 1) * kv_dim));
      values.insert(values.end(), v.begin() + static_cast<std::ptrdiff_t>(row * kv_dim),
                    v.begin() + static_cast<std::ptrdiff_t>((row + 1) * kv_dim));
      const std::size_t n = keys.size() / kv_dim;
      for (std::size_t h = 0; h < dim / d; ++h) {
        std::vector<double> p(n);
        double largest = -1e300, sum = 0;
        for (std::size_t t = 0; t < n; ++t) {
          double dot = 0;
          for (std::size_t i = 0; i < d; ++i)
            dot += double(q[row * dim + h * d + i]) * double(keys[t * kv_dim + h / group * d + i]);
          p[t] = dot / std::sqrt(double(d));
          largest = std::max(largest, p[t]);
        }
        for (double& value : p) sum += value = std::exp(value - largest);
        for (std::size_t i = 0; i < d; ++i) {
          double o = 0;
          for (std::size_t t = 0; t < n; ++t)
            o += p[t] * double(values[t * kv_dim + h / group * d + i]);
          out[row * dim + h * d + i] = static_cast<float>(o / sum);
        }
      }
    }
  }

 private:
  llama::Config config_;
  std::vector<std::vector<float>> k_, v_;
};

/// Greedy text, the prompt in one pass of `prompt.size()` rows or in passes of one row.
std::string generate(const llama::Model& model, const llama::Tokenizer& tokenizer,
                     const std::string& prompt, int steps, bool prompt_at_once) {
  std::vector<int> tokens = tokenizer.encode(prompt);
  PlainAttention attention(model.config);
  llama::Serial serial;
  std::size_t done = 0;
  while (tokens.size() <= static_cast<std::size_t>(steps)) {
    const std::size_t rows = prompt_at_once ? tokens.size() - done : 1;
    std::vector<int> positions;
    for (std::size_t r = 0; r < rows; ++r) positions.push_back(static_cast<int>(done + r));
    const std::vector<int> last{static_cast<int>(rows) - 1};
    const auto logits =
        llama::forward(model, serial, std::span<const int>(tokens).subspan(done, rows), positions,
                       last, attention);
    done += rows;
    if (done < tokens.size()) continue;
    const int next = llama::argmax(logits);
    if (next == llama::Tokenizer::bos) break;
    tokens.push_back(next);
  }
  return tokenizer.decode(tokens);
}

}  // namespace

TEST_CASE("a checkpoint is read as its header says") {
  const TemporaryFile file(checkpoint_bytes(tiny_header, tiny_floats));
  const llama::Model model = llama::load_checkpoint(file.path());
  CHECK(model.config.dim == 8);
  CHECK(model.config.hidden_dim == 12);
  CHECK(model.config.num_layers == 2);
  CHECK(model.config.num_qo_heads == 4);
  CHECK(model.config.num_kv_heads == 2);
  CHECK(model.config.head_dim() == 2);
  CHECK(model.config.kv_dim() == 4);
  CHECK(model.config.vocab_size == 10);
  CHECK(model.config.max_positions == 16);
  CHECK(model.config.shared_classifier);
  CHECK(model.embedding[1] == 0.001f);
  CHECK(model.attention_norm[0] == 80 * 0.001f);
  CHECK(model.layer(model.attention_norm, 1)[0] == 88 * 0.001f);
  CHECK(model.final_norm[0] == static_cast<float>(tiny_floats - 32 - 8) * 0.001f);
  CHECK(model.classifier.data() == model.embedding.data());
}

TEST_CASE("a negative vocabulary size brings a classifier of its own") {
  std::vector<std::int32_t> header = tiny_header;
  header[5] = -10;
  const TemporaryFile file(checkpoint_bytes(header, tiny_floats + 80));
  const llama::Model model = llama::load_checkpoint(file.path());
  CHECK(model.config.vocab_size == 10);
  CHECK_FALSE(model.config.shared_classifier);
  CHECK(model.classifier[0] == static_cast<float>(tiny_floats) * 0.001f);
  CHECK(contains(load_failure(checkpoint_bytes(header, tiny_floats)), "truncated"));
}

TEST_CASE("a file that is no checkpoint of this size is refused with its name and the reason") {
  CHECK(load_failure(checkpoint_bytes(tiny_header, tiny_floats)) == "");
  CHECK(contains(load_failure({}), "too short for the header"));
  CHECK(contains(load_failure(Bytes(27, 1)), "too short for the header"));
  CHECK(contains(load_failure(checkpoint_bytes(tiny_header, tiny_floats - 1)), "truncated"));
  CHECK(contains(load_failure(checkpoint_bytes(tiny_header, 0)), "truncated"));
  CHECK(contains(load_failure(checkpoint_bytes(tiny_header, tiny_floats + 1)), "oversized"));
  Bytes odd = checkpoint_bytes(tiny_header, tiny_floats);
  odd.push_back(0);
  CHECK(contains(load_failure(odd), "oversized"));

  const std::string text = "This is a letter to a friend, and certainly no checkpoint of a model.";
  CHECK(contains(load_failure(Bytes(text.begin(), text.end())), "not a llama2.c checkpoint"));
  const std::vector<std::vector<std::int32_t>> foreign{{0, 12, 2, 4, 2, 10, 16},
                                                       {-8, 12, 2, 4, 2, 10, 16},
                                                       {8, 0, 2, 4, 2, 10, 16},
                                                       {8, 12, 0, 4, 2, 10, 16},
                                                       {8, 12, 2, 3, 2, 10, 16},
                                                       {8, 12, 2, 0, 2, 10, 16},
                                                       {8, 12, 2, 8, 2, 10, 16},
                                                       {8, 12, 2, 4, 3, 10, 16},
                                                       {8, 12, 2, 4, 0, 10, 16},
                                                       {8, 12, 2, 4, 2, 0, 16},
                                                       {8, 12, 2, 4, 2, 10, 0},
                                                       {8, 12, 2, 4, 2, 10, -1},
                                                       {8, 12, 2, 4, 2, -2147483647 - 1, 16}};
  for (const auto& header : foreign)
    CHECK(
        contains(load_failure(checkpoint_bytes(header, tiny_floats)), "not a llama2.c checkpoint"));
  try {
    (void)llama::load_checkpoint("/nonexistent/model.bin");
    FAIL("no error");
  } catch (const llama::FileError& error) {
    CHECK(std::string(error.what()) == "/nonexistent/model.bin: cannot be opened");
  }
}

TEST_CASE("a tokenizer file is checked too") {
  Bytes good(4);
  good[0] = 7;
  for (const char* piece : {"<unk>", "<s>", "</s>", "a"}) append_piece(good, piece, 0);
  const auto failure = [](const Bytes& bytes, int vocab_size) -> std::string {
    const TemporaryFile file(bytes);
    try {
      (void)llama::Tokenizer::load(file.path(), vocab_size);
    } catch (const llama::FileError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(failure(good, 4) == "");
  CHECK(contains(failure(good, 5), "truncated"));
  CHECK(contains(failure(good, 3), "oversized"));
  CHECK(contains(failure(Bytes(good.begin(), good.end() - 1), 4), "truncated"));
  CHECK(contains(failure(Bytes(2), 4), "truncated"));
  CHECK(contains(failure(Bytes(40, 0), 4), "not a llama2.c tokenizer"));
  CHECK(contains(failure(Bytes(40, 1), 4), "not a llama2.c tokenizer"));
  Bytes negative = good;
  negative[11] = 0xff;  // the top byte of the first piece's length
  CHECK(contains(failure(negative, 4), "not a llama2.c tokenizer"));
}

TEST_CASE("encode merges the best pair first and falls back to bytes") {
  std::vector<std::string> pieces{"<unk>", "\n<s>\n", "\n</s>\n"};
  for (int b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(b));
    pieces.emplace_back(name);
  }
  const int space = static_cast<int>(pieces.size());
  for (const char* piece : {" ", "a", "b", "c", " a", "ab", "bc", "abc", "\xc3\xa9", "x"})
    pieces.emplace_back(piece);
  std::vector<float> scores(pieces.size(), 0.0f);
  const auto id = [&](const char* piece) {
    for (std::size_t i = 0; i < pieces.size(); ++i)
      if (pieces[i] == piece) return static_cast<int>(i);
    return -1;
  };
  const auto score = [&](const char* piece) -> float& {
    return scores[static_cast<std::size_t>(id(piece))];
  };
  score(" a") = -3;
  score("ab") = -2;
  score("bc") = -1;
  score("abc") = -4;
  const llama::Tokenizer tokenizer(pieces, scores);
  using Tokens = std::vector<int>;
  CHECK(tokenizer.encode("") == Tokens{1});
  CHECK(tokenizer.encode("a") == Tokens{1, id(" a")});
  CHECK(tokenizer.encode("ab") == Tokens{1, space, id("ab")});
  CHECK(tokenizer.encode("abc") == Tokens{1, id(" a"), id("bc")});  // bc, then " a" beats abc
  CHECK(tokenizer.encode("\xc3\xa9") == Tokens{1, space, id("\xc3\xa9")});
  CHECK(tokenizer.encode("\xc3\xa8") == Tokens{1, space, 3 + 0xc3, 3 + 0xa8});
  CHECK(tokenizer.encode("\x80\x80") == Tokens{1, space, 3 + 0x80, 3 + 0x80});

  CHECK(tokenizer.decode(1, id(" a")) == "a");
  CHECK(tokenizer.decode(5, id(" a")) == " a");
  CHECK(tokenizer.decode(5, 3 + 0x0a) == "\n");
  CHECK(tokenizer.decode(5, 3 + 0x07) == "");
  CHECK(tokenizer.decode(5, 3 + 0xc3) == "");
  CHECK(tokenizer.decode(tokenizer.encode("abc")) == "abc");
  CHECK(llama::Tokenizer::bytes_only(300).decode(
            llama::Tokenizer::bytes_only(300).encode("plain text")) == "plain text");
}

TEST_CASE("argmax is the first of the largest") {
  CHECK(llama::argmax(std::vector<float>{-2, -1, -3}) == 1);
  CHECK(llama::argmax(std::vector<float>{0, 5, 5, 5}) == 1);
  CHECK(llama::argmax(std::vector<float>{7}) == 0);
}

TEST_CASE("matmul gives the same bits for a row whatever the batch") {
  const llama::Model model = llama::random_model({37, 5, 1, 1, 1, 61, 4, true}, 11);
  const std::size_t inputs = 37, outputs = 61;
  llama::Serial serial;
  std::vector<float> x(33 * inputs);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  std::vector<float> all(33 * outputs);
  llama::matmul(serial, x, model.embedding, all, 33);
  for (const std::size_t r : {0u, 1u, 15u, 16u, 32u}) {
    std::vector<float> one(outputs);
    llama::matmul(serial, std::span<const float>(x).subspan(r * inputs, inputs), model.embedding,
                  one, 1);
    for (std::size_t o = 0; o < outputs; ++o) {
      double exact = 0;
      for (std::size_t j = 0; j < inputs; ++j)
        exact += double(x[r * inputs + j]) * double(model.embedding[o * inputs + j]);
      CHECK(one[o] == all[r * outputs + o]);
      CHECK(std::abs(double(one[o]) - exact) < 1e-5);
    }
  }
}

TEST_CASE("the forward pass reproduces the recorded texts with plain attention") {
  if (!have_models()) return;
  const llama::Model model = llama::load_checkpoint(data_folder() + "/models/stories260K.bin");
  const auto tokenizer =
      llama::Tokenizer::load(data_folder() + "/models/tok512.bin", model.config.vocab_size);
  std::string greedy = read_text(data_folder() + "/models/stories260K.greedy.txt");
  if (greedy.ends_with('\n')) greedy.pop_back();
  CHECK(generate(model, tokenizer, "", 256, false) == greedy);
  const auto recorded =
      nlohmann::json::parse(read_text(data_folder() + "/models/stories260K.prompts.json"));
  REQUIRE(recorded.size() == 6);
  for (const auto& entry : recorded)
    for (const bool prompt_at_once : {true, false})
      CHECK(generate(model, tokenizer, entry.at("prompt").get<std::string>(),
                     entry.at("steps").get<int>(),
                     prompt_at_once) == entry.at("text").get<std::string>());
}
