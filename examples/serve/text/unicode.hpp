// Classes of characters for pre-tokenizers. They are those of the Unicode tables in libutf8proc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace serve {

enum class CharacterClass : std::uint8_t { letter, number, space, other };

/// A character of a text: its code point and the byte that it begins at. A byte that belongs to no
/// character stands for itself, with a code point below 0 and of class other.
struct Character {
  std::int32_t code_point = -1;
  CharacterClass kind = CharacterClass::other;
  std::size_t begin = 0;
};

/// The characters of a text, and one more that begins at its end.
[[nodiscard]] std::vector<Character> characters(std::string_view text);

/// Bytes of the character that begins the text: 1 where it begins none.
[[nodiscard]] std::size_t character_bytes(std::string_view text);

/// Bytes of the white space that begins the text.
[[nodiscard]] std::size_t leading_space(std::string_view text);
/// The text without the white space around it, as Python's strip() has it.
[[nodiscard]] std::string_view stripped(std::string_view text);

}  // namespace serve
