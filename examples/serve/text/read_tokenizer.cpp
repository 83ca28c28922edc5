// Tokenizers from files.
#include <cmath>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>

#include "byte_level_bpe.hpp"
#include "sentence_piece.hpp"
#include "tokenizer.hpp"

namespace serve {

namespace {

constexpr const char* tokens_key = "tokenizer.ggml.tokens";
constexpr const char* merges_key = "tokenizer.ggml.merges";

/// Types of tokens, by the numbers of the format.
enum class TokenType { normal = 1, unknown, control, user_defined, unused, byte };

std::string at(const char* key, std::size_t index) {
  return std::string(key) + "[" + std::to_string(index) + "]";
}

/// One for each token. \throws FileError if there are more or fewer
std::span<const double> numbers_of_tokens(const Gguf& gguf, const char* key) {
  const auto numbers = gguf.numbers(key);
  if (numbers.size() != gguf.texts(tokens_key).size())
    gguf.fail(key, std::to_string(numbers.size()) + " of them",
              "one for each of the " + std::to_string(gguf.texts(tokens_key).size()) + " tokens");
  return numbers;
}

std::vector<TokenType> read_types(const Gguf& gguf) {
  constexpr const char* key = "tokenizer.ggml.token_type";
  std::vector<TokenType> types;
  for (const double number : numbers_of_tokens(gguf, key)) {
    if (!(number >= 1 && number <= 6))
      gguf.fail(at(key, types.size()), std::to_string(number), "1 to 6");
    types.push_back(static_cast<TokenType>(static_cast<int>(number)));
  }
  return types;
}

SpecialTokens read_special(const Gguf& gguf, const std::vector<TokenType>& types,
                           bool usually_adds_bos) {
  const auto tokens = gguf.texts(tokens_key);
  const auto id = [&](const char* key) {
    const auto last = static_cast<std::int64_t>(tokens.size()) - 1;
    return static_cast<int>(gguf.has(key) ? gguf.integer(key, 0, last) : -1);
  };
  const bool is_phi3 = gguf.text("general.architecture", "") == "phi3" &&
                       gguf.text("tokenizer.ggml.model") == "llama";
  SpecialTokens special;
  special.bos = id("tokenizer.ggml.bos_token_id");
  special.add_bos = gguf.flag("tokenizer.ggml.add_bos_token", usually_adds_bos) && special.bos >= 0;
  for (const int token : {id("tokenizer.ggml.eos_token_id"), id("tokenizer.ggml.eot_token_id"),
                          special.bos})  // a text that begins again has ended
    if (token >= 0) special.stop.push_back(token);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool control = types[i] == TokenType::control, unknown = types[i] == TokenType::unknown;
    if (control || types[i] == TokenType::user_defined)
      special.by_name.push_back(static_cast<int>(i));
    if (control || unknown) special.invisible.push_back(static_cast<int>(i));
    // Files of some models name one token that ends a text, while others do, too.
    for (const char* name : {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>",
                             "<|end_of_text|>", "<end_of_turn>", "<|end|>"})
      if (control && tokens[i] == name) special.stop.push_back(static_cast<int>(i));
    // Phi-3's, of which files do not say it.
    const bool keeps_space = tokens[i] == "<s>" || tokens[i] == "<|endoftext|>";
    if (is_phi3 && control && !keeps_space) special.strips.push_back(static_cast<int>(i));
  }
  return special;
}

std::vector<std::array<int, 3>> read_merges(const Gguf& gguf) {
  std::unordered_map<std::string_view, int> ids;
  for (const std::string_view token : gguf.texts(tokens_key))
    ids.emplace(token, static_cast<int>(ids.size()));
  std::vector<std::array<int, 3>> merges;
  for (const std::string_view merge : gguf.texts(merges_key)) {
    const std::size_t space = merge.find(' ');
    const auto find = [&](std::string_view piece) {
      const auto found = ids.find(piece);
      if (space == std::string_view::npos || found == ids.end())
        gguf.fail(at(merges_key, merges.size()), std::string(merge),
                  "two tokens, a space between them, that together are a token");
      return found->second;
    };
    const std::string_view left = merge.substr(0, space);
    const std::string_view right = merge.substr(space == std::string_view::npos ? 0 : space + 1);
    merges.push_back({find(left), find(right), find(std::string(left) + std::string(right))});
  }
  return merges;
}

std::unique_ptr<Tokenizer> read_byte_level(const Gguf& gguf) {
  const std::string_view name = gguf.text("tokenizer.ggml.pre");
  const auto pre_tokenizer = pre_tokenizer_of(name);
  if (!pre_tokenizer)
    gguf.fail("tokenizer.ggml.pre", std::string(name), "gpt-2, smollm, qwen2, llama-bpe or llama3");
  const std::vector<TokenType> types = read_types(gguf);
  ByteLevelBpe::Vocabulary vocabulary;
  vocabulary.pre_tokenizer = *pre_tokenizer;
  const auto tokens = gguf.texts(tokens_key);
  std::unordered_map<std::string_view, std::size_t> seen;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (const auto [first, is_new] = seen.emplace(tokens[i], i); !is_new)
      gguf.fail(at(tokens_key, i), std::string(tokens[i]),
                "another name than that of token " + std::to_string(first->second));
    const bool is_text = types[i] == TokenType::normal;
    vocabulary.is_text.push_back(is_text);
    vocabulary.pieces.push_back(is_text ? ByteLevelBpe::bytes_of(tokens[i])
                                        : std::string(tokens[i]));
  }
  vocabulary.merges = read_merges(gguf);
  return std::make_unique<ByteLevelBpe>(
      std::move(vocabulary), read_special(gguf, types, *pre_tokenizer == PreTokenizer::llama3));
}

std::unique_ptr<Tokenizer> read_sentence_piece(const Gguf& gguf) {
  const std::vector<TokenType> types = read_types(gguf);
  const auto tokens = gguf.texts(tokens_key);
  SentencePiece::Vocabulary vocabulary;
  constexpr const char* scores_key = "tokenizer.ggml.scores";
  for (const double number : numbers_of_tokens(gguf, scores_key)) {
    const auto score = static_cast<float>(number);
    if (!std::isfinite(score))
      gguf.fail(at(scores_key, vocabulary.scores.size()), std::to_string(number),
                "a finite number");
    vocabulary.scores.push_back(score);
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const int byte = SentencePiece::byte_of(tokens[i]);
    if (types[i] == TokenType::byte && byte < 0)
      gguf.fail(at(tokens_key, i), std::string(tokens[i]), "the name of a byte, as <0x0A>");
    if (types[i] == TokenType::byte)
      vocabulary.pieces.emplace_back(1, static_cast<char>(static_cast<unsigned char>(byte)));
    else
      vocabulary.pieces.push_back(SentencePiece::with_spaces(tokens[i]));
    vocabulary.kinds.push_back(types[i] == TokenType::byte     ? SentencePiece::Kind::byte
                               : types[i] == TokenType::normal ? SentencePiece::Kind::text
                                                               : SentencePiece::Kind::special);
  }
  vocabulary.space_prefix = gguf.flag("tokenizer.ggml.add_space_prefix", true);
  return std::make_unique<SentencePiece>(std::move(vocabulary), read_special(gguf, types, true));
}

}  // namespace

std::unique_ptr<Tokenizer> read_tokenizer(const Gguf& gguf) {
  const std::string_view model = gguf.text("tokenizer.ggml.model");
  if (model == "gpt2") return read_byte_level(gguf);
  if (model == "llama") return read_sentence_piece(gguf);
  gguf.fail("tokenizer.ggml.model", std::string(model), "gpt2 or llama");
}

namespace {

// What llama2.c fixes: the unknown token, bos, eos, and then a token for each byte.
constexpr int llama2c_bos = 1, llama2c_eos = 2, llama2c_first_byte = 3;

SpecialTokens llama2c_special() {
  return {.bos = llama2c_bos,
          .add_bos = true,
          .stop = {llama2c_bos, llama2c_eos},
          .by_name = {},
          .invisible = {0, llama2c_bos, llama2c_eos}};
}

}  // namespace

std::unique_ptr<Tokenizer> read_llama2c_tokenizer(const std::string& path, int vocab_size) {
  const MappedFile file(path);
  FieldReader reader(file, "a llama2.c tokenizer for " + std::to_string(vocab_size) + " pieces");
  const auto longest = reader.number<std::int32_t>("max_token_length");
  if (longest <= 0 || longest > 4096)
    reader.fail("max_token_length", std::to_string(longest), "1 to 4096");
  SentencePiece::Vocabulary vocabulary;
  for (int i = 0; i < vocab_size; ++i) {
    const std::string field = "piece " + std::to_string(i);
    const auto score = reader.number<float>(field + " (score)");
    if (!std::isfinite(score))
      reader.fail(field + " (score)", std::to_string(score), "a finite number");
    vocabulary.scores.push_back(score);
    const auto length = reader.number<std::int32_t>(field + " (length)");
    if (length < 0 || length > 4096)
      reader.fail(field + " (length)", std::to_string(length), "0 to 4096");
    std::string piece(reader.text(static_cast<std::size_t>(length), field));
    using Kind = SentencePiece::Kind;
    Kind kind = i < llama2c_first_byte ? Kind::special : Kind::text;
    const int byte = SentencePiece::byte_of(piece);
    if (i >= llama2c_first_byte && i < llama2c_first_byte + 256 && byte >= 0) {
      piece.assign(1, static_cast<char>(static_cast<unsigned char>(byte)));
      kind = Kind::byte;
    }
    vocabulary.pieces.push_back(std::move(piece));
    vocabulary.kinds.push_back(kind);
  }
  if (reader.left() != 0)
    reader.fail("file size", std::to_string(file.bytes().size()),
                std::to_string(reader.position()) + ": it is oversized");
  return std::make_unique<SentencePiece>(std::move(vocabulary), llama2c_special());
}

std::unique_ptr<Tokenizer> byte_tokenizer(int vocab_size) {
  const auto size = static_cast<std::size_t>(vocab_size);
  SentencePiece::Vocabulary vocabulary;
  vocabulary.scores.resize(size);
  vocabulary.kinds.assign(size, SentencePiece::Kind::special);
  vocabulary.pieces.resize(size);
  vocabulary.space_prefix = false;
  for (std::size_t byte = 0; byte < 256; ++byte) {
    vocabulary.pieces[llama2c_first_byte + byte].assign(
        1, static_cast<char>(static_cast<unsigned char>(byte)));
    vocabulary.kinds[llama2c_first_byte + byte] = SentencePiece::Kind::byte;
  }
  return std::make_unique<SentencePiece>(std::move(vocabulary), llama2c_special());
}

}  // namespace serve
