#include "pre_tokenizer.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include "unicode.hpp"

namespace serve {

namespace {

/// The characters of what is cut, and how expressions match there. Positions count characters.
class Matcher {
 public:
  explicit Matcher(std::span<const Character> characters) : characters_(characters) {}

  [[nodiscard]] std::size_t size() const { return characters_.size(); }
  [[nodiscard]] std::int32_t code_point(std::size_t at) const {
    return at < size() ? characters_[at].code_point : -1;
  }
  [[nodiscard]] bool is(std::size_t at, CharacterClass kind) const {
    return at < size() && characters_[at].kind == kind;
  }
  [[nodiscard]] bool is_newline(std::size_t at) const {
    return code_point(at) == '\r' || code_point(at) == '\n';
  }
  /// The end of the run of this class that begins at `at`.
  [[nodiscard]] std::size_t run(std::size_t at, CharacterClass kind) const {
    while (is(at, kind)) ++at;
    return at;
  }

  /// The end of 's, 't, 're, 've, 'm, 'll or 'd at `at`; `at` itself where there is none.
  [[nodiscard]] std::size_t contraction(std::size_t at, bool any_case) const {
    if (code_point(at) != '\'') return at;
    const auto letter = [&](std::size_t i) {
      const std::int32_t c = code_point(i);
      if (!any_case) return c;
      if (c == 0x17f) return std::int32_t{'s'};  // the long s is an s in another case
      return c >= 'A' && c <= 'Z' ? c + 32 : c;
    };
    const std::int32_t first = letter(at + 1), second = letter(at + 2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l'))
      return at + 3;
    return at;
  }

  /// \s+(?!\S)|\s+ : white space, but for its last character where something follows.
  [[nodiscard]] std::size_t white_space(std::size_t at) const {
    const std::size_t end = run(at, CharacterClass::space);
    return end == size() || end == at + 1 ? end : end - 1;
  }

 private:
  std::span<const Character> characters_;
};

std::size_t gpt2_piece(const Matcher& m, std::size_t at) {
  if (const std::size_t end = m.contraction(at, false); end != at) return end;
  const std::size_t first = at + (m.code_point(at) == ' ' ? 1 : 0);  // " ?"
  for (const auto kind : {CharacterClass::letter, CharacterClass::number, CharacterClass::other})
    if (m.is(first, kind)) return m.run(first, kind);
  return m.white_space(at);
}

/// \param digits  that a piece has at most
std::size_t llama3_piece(const Matcher& m, std::size_t at, std::size_t digits) {
  if (const std::size_t end = m.contraction(at, true); end != at) return end;
  if (m.is(at, CharacterClass::letter)) return m.run(at, CharacterClass::letter);
  if (!m.is_newline(at) && !m.is(at, CharacterClass::number) &&
      m.is(at + 1, CharacterClass::letter))
    return m.run(at + 1, CharacterClass::letter);
  if (m.is(at, CharacterClass::number))
    return std::min(m.run(at, CharacterClass::number), at + digits);
  const std::size_t first = at + (m.code_point(at) == ' ' ? 1 : 0);
  if (m.is(first, CharacterClass::other)) {
    std::size_t end = m.run(first, CharacterClass::other);
    while (m.is_newline(end)) ++end;
    return end;
  }
  std::size_t end = m.run(at, CharacterClass::space);  // \s*[\r\n]+ : up to the last line's end
  while (end > at && !m.is_newline(end - 1)) --end;
  return end > at ? end : m.white_space(at);
}

}  // namespace

std::optional<PreTokenizer> pre_tokenizer_of(std::string_view name) {
  if (name == "gpt-2") return PreTokenizer::gpt2;
  if (name == "smollm") return PreTokenizer::smollm;
  if (name == "qwen2") return PreTokenizer::qwen2;
  if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") return PreTokenizer::llama3;
  return std::nullopt;
}

std::vector<std::string_view> pre_tokenize(PreTokenizer kind, std::string_view text) {
  const std::vector<Character> all = characters(text);
  const std::size_t size = all.size() - 1;
  std::vector<std::string_view> pieces;
  // An expression sees what is between `begin` and `end` and nothing after it.
  const auto cut = [&](std::size_t begin, std::size_t end) {
    const Matcher matcher(std::span<const Character>(all).subspan(begin, end - begin));
    for (std::size_t at = 0; at < matcher.size();) {
      const std::size_t next = kind == PreTokenizer::llama3  ? llama3_piece(matcher, at, 3)
                               : kind == PreTokenizer::qwen2 ? llama3_piece(matcher, at, 1)
                                                             : gpt2_piece(matcher, at);
      const std::size_t first = all[begin + at].begin;
      pieces.push_back(text.substr(first, all[begin + next].begin - first));
      at = next;
    }
  };
  if (kind != PreTokenizer::smollm) {
    cut(0, size);
    return pieces;
  }
  std::size_t begin = 0;
  for (std::size_t at = 0; at < size; ++at) {
    if (all[at].kind != CharacterClass::number) continue;
    cut(begin, at);
    pieces.push_back(text.substr(all[at].begin, all[at + 1].begin - all[at].begin));
    begin = at + 1;
  }
  cut(begin, size);
  return pieces;
}

}  // namespace serve
