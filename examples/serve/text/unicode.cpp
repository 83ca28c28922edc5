#include "unicode.hpp"

#include <utf8proc.h>

namespace serve {

namespace {

CharacterClass class_of(std::int32_t code_point) {
  // White space that Unicode counts among the control characters.
  if ((code_point >= 0x09 && code_point <= 0x0d) || code_point == 0x85)
    return CharacterClass::space;
  switch (utf8proc_category(code_point)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharacterClass::letter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharacterClass::number;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return CharacterClass::space;
    default:
      return CharacterClass::other;
  }
}

/// The code point that begins the text, or one below 0, and its bytes.
std::int32_t decode(std::string_view text, std::size_t& bytes) {
  utf8proc_int32_t code_point = -1;
  const auto read = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                     static_cast<utf8proc_ssize_t>(text.size()), &code_point);
  bytes = read > 0 ? static_cast<std::size_t>(read) : 1;
  return read > 0 ? code_point : -1;
}

/// Bytes of the white space, as Python has it, that is the first character; 0: it is none.
std::size_t space_bytes(std::string_view text) {
  std::size_t bytes = 0;
  const std::int32_t code_point = text.empty() ? -1 : decode(text, bytes);
  const bool separates = code_point >= 0x1c && code_point <= 0x1f;  // files, groups, records, units
  return code_point >= 0 && (separates || class_of(code_point) == CharacterClass::space) ? bytes
                                                                                         : 0;
}

}  // namespace

std::size_t leading_space(std::string_view text) {
  std::size_t at = 0;
  while (const std::size_t bytes = space_bytes(text.substr(at))) at += bytes;
  return at;
}

std::string_view stripped(std::string_view text) {
  text.remove_prefix(leading_space(text));
  while (!text.empty()) {
    std::size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xc0) == 0x80) --last;
    if (space_bytes(text.substr(last)) != text.size() - last) break;
    text = text.substr(0, last);
  }
  return text;
}

std::size_t character_bytes(std::string_view text) {
  std::size_t bytes = 1;
  (void)decode(text, bytes);
  return bytes;
}

std::vector<Character> characters(std::string_view text) {
  std::vector<Character> all;
  all.reserve(text.size() + 1);
  for (std::size_t at = 0; at < text.size();) {
    std::size_t bytes = 1;
    const std::int32_t code_point = decode(text.substr(at), bytes);
    all.push_back({code_point, code_point < 0 ? CharacterClass::other : class_of(code_point), at});
    at += bytes;
  }
  all.push_back({-1, CharacterClass::other, text.size()});
  return all;
}

}  // namespace serve
