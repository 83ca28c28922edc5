// Tokenizers: how texts are cut and merged, who may name special tokens, and files that are
// refused. Agreement with the package that models are made with: check/compare_tokenizers.py.
#include <doctest/doctest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model/load.hpp"
#include "tests/support/random.hpp"
#include "text/byte_level_bpe.hpp"
#include "text/pre_tokenizer.hpp"
#include "text/sentence_piece.hpp"
#include "tiny_gguf.hpp"

using namespace serve;
using Tokens = std::vector<int>;
using Texts = std::vector<std::string>;

namespace {

Texts cut(PreTokenizer kind, const std::string& text) {
  Texts pieces;
  for (const auto piece : pre_tokenize(kind, text)) pieces.emplace_back(piece);
  return pieces;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

/// What is said of a file with one key in place of tiny_gguf()'s.
std::string refused_key(const std::function<void(test::GgufWriter&)>& add) {
  test::GgufWriter writer;
  add(writer);
  const test::TemporaryFile file(writer.bytes());
  return refusal([&] { (void)read_tokenizer(Gguf(file.path())); });
}

/// Letters a, b, c, their merges, and an é, after what llama2.c fixes.
struct SmallPieces {
  SentencePiece::Vocabulary vocabulary;
  SmallPieces() {
    add("<unk>", 0, SentencePiece::Kind::special);
    add("<s>", 0, SentencePiece::Kind::special);
    add("</s>", 0, SentencePiece::Kind::special);
    for (int b = 0; b < 256; ++b)
      add(std::string(1, static_cast<char>(b)), 0, SentencePiece::Kind::byte);
    for (const char* piece : {" ", "a", "b", "c", "\xc3\xa9"}) add(piece, 0);
    add(" a", -3), add("ab", -2), add("bc", -1), add("abc", -4);
  }
  void add(const std::string& piece, float score,
           SentencePiece::Kind kind = SentencePiece::Kind::text) {
    vocabulary.pieces.push_back(piece);
    vocabulary.scores.push_back(score);
    vocabulary.kinds.push_back(kind);
  }
  [[nodiscard]] int id(const std::string& piece) const {
    for (std::size_t i = 259; i < vocabulary.pieces.size(); ++i)
      if (vocabulary.pieces[i] == piece) return static_cast<int>(i);
    return -1;
  }
};

Tokens encode(const Tokenizer& tokenizer, const std::string& text, bool trusted = false) {
  const TextPart part{text, trusted};
  return tokenizer.encode({&part, 1});
}

}  // namespace

TEST_CASE("each pre-tokenizer cuts as its expression does") {
  using P = PreTokenizer;
  CHECK(cut(P::gpt2, "it's  I'Ll 12½!") == Texts{"it", "'s", " ", " I", "'", "Ll", " 12½", "!"});
  CHECK(cut(P::gpt2, "a \n b  ") == Texts{"a", " \n", " b", "  "});
  CHECK(cut(P::gpt2, "x\u3000y") == Texts{"x", "\u3000", "y"});
  CHECK(cut(P::gpt2, "\xff\xfe a") ==
        Texts{"\xff\xfe", " a"});  // no UTF-8: neither letter nor space
  CHECK(cut(P::smollm, "a  12x ½") == Texts{"a", "  ", "1", "2", "x", " ", "½"});
  CHECK(cut(P::llama3, "it'S 1234\n\n!!\r\nx") ==
        Texts{"it", "'S", " ", "123", "4", "\n\n", "!!\r\n", "x"});
  CHECK(cut(P::qwen2, "it'S 123\n\n!!\r\nx") ==
        Texts{"it", "'S", " ", "1", "2", "3", "\n\n", "!!\r\n", "x"});
  CHECK(cut(P::llama3, " \n  \n  b\tc(d") == Texts{" \n  \n", " ", " b", "\tc", "(d"});
  CHECK(cut(P::llama3, "I'\u017f") == Texts{"I", "'\u017f"});
  for (const P kind : {P::gpt2, P::smollm, P::qwen2, P::llama3}) CHECK(cut(kind, "").empty());
}

TEST_CASE("no byte of a text is lost or moved by cutting it") {
  test::Random random(1);
  const std::string some[] = {"a",      "1", " ",    "\n", "'s", "é",
                              "\u3000", "!", "\xff", "ｚ", "\r", "'"};
  for (int round = 0; round < test::scaled(2000); ++round) {
    std::string text;
    for (int i = random.uniform(0, 12); i > 0; --i) text += random.pick(some);
    for (const auto kind :
         {PreTokenizer::gpt2, PreTokenizer::smollm, PreTokenizer::qwen2, PreTokenizer::llama3}) {
      std::string joined;
      for (const std::string& piece : cut(kind, text)) {
        CHECK_FALSE(piece.empty());
        joined += piece;
      }
      CHECK(joined == text);
    }
  }
}

TEST_CASE("a byte-level vocabulary is read from a file and merges by rank") {
  const test::TemporaryFile file(test::tiny_gguf().bytes());
  const auto tokenizer = read_tokenizer(Gguf(file.path()));
  // <s> a b c ab Ġ Ġa Ċ <e>
  CHECK(encode(*tokenizer, "ab ac") == Tokens{4, 6, 3});
  CHECK(encode(*tokenizer, "  a\n") == Tokens{5, 6, 7});
  CHECK(encode(*tokenizer, "azb") == Tokens{4});  // no token has the byte between them
  CHECK(tokenizer->decode(Tokens{0, 6, 3, 7, 8}) == " ac\n");
  CHECK(tokenizer->stop_tokens() == Tokens{8});
  CHECK(tokenizer->vocab_size() == 9);
}

TEST_CASE("special tokens are named by who is trusted, and by nobody in a chat") {
  const test::TemporaryFile file(test::tiny_gguf().bytes());
  const auto tokenizer = read_tokenizer(Gguf(file.path()));
  CHECK(encode(*tokenizer, "a<s>b", true) == Tokens{1, 0, 2});
  CHECK(encode(*tokenizer, "a<s>b", false) == Tokens{1, 2});  // < s > are no tokens here
  CHECK(tokenizer->encode_prompt("<e>") == Tokens{8});
  // A name that is put together from two parts is none, and words go on from part to part.
  const std::vector<TextPart> parts{{"<s", true}, {">a", false}, {"b", true}, {"<e>", true}};
  CHECK(tokenizer->encode(parts) == Tokens{4, 8});
}

TEST_CASE("SentencePiece merges the best pair first and spells the rest in bytes") {
  const SmallPieces small;
  const SentencePiece tokenizer(
      small.vocabulary,
      {.bos = 1, .add_bos = true, .stop = {1}, .by_name = {1}, .invisible = {0, 1, 2}});
  const auto id = [&](const char* piece) { return small.id(piece); };
  const int space = id(" ");
  CHECK(tokenizer.encode_prompt("") == Tokens{1});
  CHECK(tokenizer.encode_prompt("a") == Tokens{1, id(" a")});
  CHECK(tokenizer.encode_prompt("ab") == Tokens{1, space, id("ab")});
  CHECK(tokenizer.encode_prompt("abc") == Tokens{1, id(" a"), id("bc")});  // then " a" beats abc
  CHECK(tokenizer.encode_prompt("\xc3\xa9") == Tokens{1, space, id("\xc3\xa9")});
  CHECK(tokenizer.encode_prompt("\xc3\xa8") == Tokens{1, space, 3 + 0xc3, 3 + 0xa8});
  CHECK(tokenizer.encode_prompt("\x80\x80") == Tokens{1, space, 3 + 0x80, 3 + 0x80});
  CHECK(tokenizer.encode_prompt("a\xe2\x96\x81"
                                "a") == Tokens{1, id(" a"), id(" a")});
  CHECK(tokenizer.encode_prompt("a<s>a") == Tokens{1, id(" a"), 1, id(" a")});

  CHECK(tokenizer.decode(1, id(" a")) == "a");
  CHECK(tokenizer.decode(5, id(" a")) == " a");
  CHECK(tokenizer.decode(5, 3 + 0x0a) == "\n");
  CHECK(tokenizer.decode(5, 3 + 0xc3) == "\xc3");
  CHECK(tokenizer.decode(5, 2) == "");
  CHECK(tokenizer.decode(tokenizer.encode_prompt("abc é")) == "abc é");
  // What a prompt names is repeated; a bos that it was given is not.
  CHECK(tokenizer.spell(-1, 1) == "");
  CHECK(tokenizer.spell(5, 1) == "<s>");
  const SentencePiece without_bos(small.vocabulary,
                                  {.bos = 1, .stop = {}, .by_name = {1}, .invisible = {0, 1, 2}});
  CHECK(without_bos.spell(-1, 1) == "<s>");
  CHECK(byte_tokenizer(300)->decode(byte_tokenizer(300)->encode_prompt("plain\xff")) ==
        "plain\xff");
}

TEST_CASE("white space that is a token of its own is one in a chat, too, the longest first") {
  SmallPieces small;
  small.vocabulary.space_prefix = false;
  small.add("\n", -9);
  const int first = static_cast<int>(small.vocabulary.pieces.size());
  SpecialTokens special;
  for (const char* name : {"\n\n", "  ", "   ", "\n\n\n", "<a>"}) {
    special.by_name.push_back(static_cast<int>(small.vocabulary.pieces.size()));
    small.add(name, 0, SentencePiece::Kind::special);
  }
  const SentencePiece tokenizer(small.vocabulary, special);
  const int a = small.id("a"), newline = small.id("\n");
  for (const bool trusted : {false, true}) {
    CHECK(encode(tokenizer, "a\n\na   a", trusted) == Tokens{a, first, a, first + 2, a});
    CHECK(encode(tokenizer, "a\na", trusted) == Tokens{a, newline, a});
    CHECK(encode(tokenizer, "\n\n\n\n\n", trusted) == Tokens{first + 3, first});
    CHECK(encode(tokenizer, "   a  ", trusted) == Tokens{first + 2, a, first + 1});
  }
  CHECK(encode(tokenizer, "<a>", true) == Tokens{first + 4});
  CHECK(encode(tokenizer, "<a>").size() == 3);
}

TEST_CASE("merging follows its order whatever the length, and not by squares") {
  // Of the letters of a text the leftmost best pair, again and again, by the simplest code there
  // is.
  const SmallPieces small;
  const SentencePiece tokenizer(small.vocabulary, {});
  test::Random random(2);
  for (int round = 0; round < test::scaled(300); ++round) {
    std::string text;
    for (int i = random.uniform(1, 30); i > 0; --i) text += "abc "[random.index(4)];
    Tokens expected{small.id(" ")};
    for (const char c : text) expected.push_back(small.id(std::string(1, c)));
    const auto& pieces = small.vocabulary.pieces;
    for (;;) {
      int best = -1;
      std::size_t at = 0;
      for (std::size_t i = 0; i + 1 < expected.size(); ++i) {
        const int merged = small.id(pieces[static_cast<std::size_t>(expected[i])] +
                                    pieces[static_cast<std::size_t>(expected[i + 1])]);
        if (merged < 0) continue;
        const auto score = [&](int token) {
          return small.vocabulary.scores[static_cast<std::size_t>(token)];
        };
        if (best < 0 || score(merged) > score(best)) best = merged, at = i;
      }
      if (best < 0) break;
      expected[at] = best;
      expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    CHECK(encode(tokenizer, text) == expected);
  }
  CHECK(encode(tokenizer, std::string(1 << 20, 'a')).size() ==
        1 << 20);  // " a", then as many less 1
}

TEST_CASE("after Phi-3's special tokens white space is not read, in whatever part it stands") {
  const auto tokens_of = [](const std::string& architecture, std::span<const TextPart> parts) {
    test::GgufWriter writer;
    writer.text("general.architecture", architecture);
    writer.text("tokenizer.ggml.model", "llama");
    writer.texts("tokenizer.ggml.tokens",
                 {"<unk>", "<s>", "<|user|>", "<|end|>", "▁", "a", "b", "<0x0A>"});
    writer.numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {2, 3, 3, 3, 1, 1, 1, 6});
    writer.numbers<float>("tokenizer.ggml.scores", 6, {0, 0, 0, 0, 0, 0, 0, 0});
    writer.flag("tokenizer.ggml.add_space_prefix", false);
    const test::TemporaryFile file(writer.bytes());
    const auto tokenizer = read_tokenizer(Gguf(file.path()));
    CHECK(tokenizer->stop_tokens() == Tokens{3});
    return tokenizer->encode(parts);
  };
  const std::vector<TextPart> parts{{"<s> a<|user|>\n", true},
                                    {" \n\u3000a\nb ", false},
                                    {"<|end|>\n", true},
                                    {" <|end|>", false},
                                    {"<|end|><|user|>\n", true}};
  CHECK(tokens_of("phi3", parts) == Tokens{1, 4, 5, 2, 5, 7, 6, 4, 3, 3, 2});
  CHECK(tokens_of("llama", std::span(parts).first(1)) == Tokens{1, 4, 5, 2, 7});
}

TEST_CASE("a text has no fewer tokens than its bytes say") {
  test::Random random(9);
  const SmallPieces small;
  const SentencePiece pieces(small.vocabulary, {.stop = {}, .by_name = {2}, .invisible = {}});
  ByteLevelBpe::Vocabulary bytes;
  for (int b = 0; b < 256; ++b) bytes.pieces.emplace_back(1, static_cast<char>(b));
  bytes.pieces.insert(bytes.pieces.end(), {"ab", "abc"});
  bytes.is_text.assign(258, true);
  bytes.merges = {{'a', 'b', 256}, {256, 'c', 257}};
  const ByteLevelBpe letters(bytes, {});
  const char* parts[] = {"a", "abc", " ", "\xe2\x96\x81", "\xe2\x96\x81", "\xc3\xa9", "</s>", "1"};
  for (int round = 0; round < test::scaled(500); ++round) {
    std::string text;
    for (int n = random.uniform(0, 30); n > 0; --n) text += parts[random.index(8)];
    CAPTURE(text);
    for (const Tokenizer* tokenizer :
         {static_cast<const Tokenizer*>(&pieces), static_cast<const Tokenizer*>(&letters)})
      CHECK(tokenizer->least_tokens(text.size()) <= tokenizer->encode_prompt(text).size());
  }
  std::string abc;
  for (int i = 0; i < 100; ++i) abc += "abc";
  CHECK(letters.encode_prompt(abc).size() == 100);
  CHECK(letters.least_tokens(abc.size()) == 100);
  CHECK(pieces.least_tokens(1'000'000) > 1'000'000 / 20);
  // Where bytes have no token, a text of any length may have none.
  bytes.is_text['x'] = false;
  CHECK(ByteLevelBpe(bytes, {}).encode_prompt("xxxx").empty());
  CHECK(ByteLevelBpe(bytes, {}).least_tokens(1'000'000) == 0);
  bytes.is_text['x'] = true;
  bytes.is_text[0xff] = false;  // which no text has
  CHECK(ByteLevelBpe(bytes, {}).least_tokens(300) == 100);
}

TEST_CASE("tokenizers that cannot be right are refused by their key") {
  CHECK(contains(refused_key([](auto& w) { w.text("tokenizer.ggml.model", "t5"); }),
                 "tokenizer.ggml.model = t5: expected gpt2 or llama"));
  const auto byte_level = [](test::GgufWriter& w) {
    w.text("tokenizer.ggml.model", "gpt2");
    w.text("tokenizer.ggml.pre", "gpt-2");
    w.texts("tokenizer.ggml.tokens", {"a", "b", "ab"});
  };
  CHECK(contains(refused_key([](auto& w) {
                   w.text("tokenizer.ggml.model", "gpt2");
                   w.text("tokenizer.ggml.pre", "deepseek-llm");
                 }),
                 "tokenizer.ggml.pre = deepseek-llm: expected gpt-2, smollm, qwen2"));
  CHECK(contains(refused_key([&](auto& w) {
                   byte_level(w);
                   w.template numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {1, 1});
                 }),
                 "tokenizer.ggml.token_type = 2 of them: expected one for each of the 3 tokens"));
  CHECK(contains(refused_key([&](auto& w) {
                   byte_level(w);
                   w.template numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {1, 1, 7});
                 }),
                 "tokenizer.ggml.token_type[2] = 7"));
  for (const char* merge : {"a c", "b a", "ab", "a  b"})
    CHECK(contains(refused_key([&](auto& w) {
                     byte_level(w);
                     w.template numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {1, 1, 1});
                     w.texts("tokenizer.ggml.merges", {"a b", merge});
                   }),
                   "tokenizer.ggml.merges[1] = " + std::string(merge)));
  CHECK(contains(refused_key([&](auto& w) {
                   byte_level(w);
                   w.template numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {1, 1, 1});
                   w.texts("tokenizer.ggml.merges", {"a b"});
                   w.integer("tokenizer.ggml.bos_token_id", 3);
                 }),
                 "tokenizer.ggml.bos_token_id = 3: expected 0 to 2"));
  CHECK(contains(refused_key([](auto& w) {
                   w.text("tokenizer.ggml.model", "llama");
                   w.texts("tokenizer.ggml.tokens", {"<0xZZ>"});
                   w.template numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {6});
                   w.template numbers<float>("tokenizer.ggml.scores", 6, {0});
                 }),
                 "tokenizer.ggml.tokens[0] = <0xZZ>: expected the name of a byte"));
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const float score : {std::numeric_limits<float>::quiet_NaN(), inf, -inf})
    CHECK(contains(
        refused_key([&](auto& w) {
          w.text("tokenizer.ggml.model", "llama");
          w.texts("tokenizer.ggml.tokens", {"a", "b"});
          w.template numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {1, 1});
          w.template numbers<float>("tokenizer.ggml.scores", 6, {0, score});
        }),
        "tokenizer.ggml.scores[1] = " + std::to_string(score) + ": expected a finite number"));
}

TEST_CASE("a llama2.c tokenizer file is checked too") {
  test::Bytes good;
  test::GgufWriter::put(good, std::int32_t{7});
  for (const std::string piece : {"<unk>", "<s>", "</s>", "a"}) {
    test::GgufWriter::put(good, 0.0f);
    test::GgufWriter::put(good, static_cast<std::int32_t>(piece.size()));
    good.insert(good.end(), piece.begin(), piece.end());
  }
  const auto said = [](const test::Bytes& bytes, int vocab_size) {
    const test::TemporaryFile file(bytes);
    return refusal([&] { (void)read_llama2c_tokenizer(file.path(), vocab_size); });
  };
  CHECK(said(good, 4).empty());
  CHECK(contains(said(good, 5), "piece 4 (score)"));
  CHECK(contains(said(good, 3), "oversized"));
  for (std::size_t size = 0; size < good.size(); ++size)
    CHECK(contains(said({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}, 4),
                   "truncated"));
  CHECK(contains(said(test::Bytes(40, 0), 4), "max_token_length = 0"));
  test::Bytes nan = good;
  nan[6] = 0xc0, nan[7] = 0x7f;  // the upper half of the first score
  CHECK(contains(said(nan, 4), "piece 0 (score) = nan: expected a finite number"));
  test::Bytes negative = good;
  negative[11] = 0xff;  // the top byte of the first piece's length
  CHECK(contains(said(negative, 4), "piece 0 (length) = -"));
}
