#include "utf8_stream.hpp"

#include <cstddef>

namespace serve {

namespace {

/// How a text begins: with `bytes` bytes that are a character, or could become one, or neither.
struct Beginning {
  std::size_t bytes = 1;
  enum { whole, half, wrong } kind = wrong;
};

Beginning beginning_of(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, Beginning::whole};
  if (lead < 0xc2 || lead > 0xf4) return {1, Beginning::wrong};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte has a narrower range where it would mean an overlong form, a surrogate, or
  // something above U+10FFFF.
  unsigned char low = 0x80, high = 0xbf;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, Beginning::half};
    if (byte(i) < low || byte(i) > high) return {i, Beginning::wrong};
    low = 0x80, high = 0xbf;
  }
  return {length, Beginning::whole};
}

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Beginning beginning = beginning_of(rest);
    if (beginning.kind == Beginning::half) break;
    out += beginning.kind == Beginning::whole ? rest.substr(0, beginning.bytes)
                                              : replacement_character;
    rest.remove_prefix(beginning.bytes);
  }
  held_.erase(0, held_.size() - rest.size());
  return out;
}

std::string Utf8Stream::finish() {
  const bool half = !held_.empty();
  held_.clear();
  return std::string(half ? replacement_character : "");
}

}  // namespace serve
