// A small JSON reader (all of RFC 8259, strict) and a writer for flat reports.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "output_file.hpp"

namespace examples {

/// Text that is not JSON, or not the JSON that was expected.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, double, std::string, Array, Object> value = nullptr;

  [[nodiscard]] const std::string& string() const { return as<std::string>("a string"); }
  [[nodiscard]] double number() const { return as<double>("a number"); }
  [[nodiscard]] const Array& array() const { return as<Array>("an array"); }
  [[nodiscard]] const Object& object() const { return as<Object>("an object"); }
  [[nodiscard]] const Json& at(const std::string& key) const {
    const auto found = object().find(key);
    if (found == object().end()) throw JsonError("JSON object has no \"" + key + "\"");
    return found->second;
  }
  [[nodiscard]] bool has(const std::string& key) const { return object().contains(key); }

 private:
  template <class T>
  [[nodiscard]] const T& as(const char* what) const {
    if (const T* held = std::get_if<T>(&value)) return *held;
    throw JsonError(std::string("JSON value is not ") + what);
  }
};

class JsonReader {
 public:
  /// Parses a whole document; anything after it but white space is an error.
  static Json parse(std::string_view text) {
    JsonReader reader(text);
    Json value = reader.read_value(0);
    reader.skip_space();
    if (reader.at_ != text.size()) reader.fail("the end");
    return value;
  }

 private:
  explicit JsonReader(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(const std::string& expected) const {
    std::size_t line = 1;
    for (std::size_t i = 0; i < at_ && i < text_.size(); ++i) line += text_[i] == '\n' ? 1u : 0u;
    std::string found = "the end of the text";
    if (at_ < text_.size()) found = {'\'', text_[at_], '\''};
    throw JsonError("JSON line " + std::to_string(line) + ": expected " + expected + ", found " +
                    found);
  }

  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  [[nodiscard]] bool take(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void need(char c) {
    if (!take(c)) fail(std::string{'\'', c, '\''});
  }

  Json read_value(int depth) {
    if (depth > 200) fail("fewer nested values");
    skip_space();
    if (at_ >= text_.size()) fail("a value");
    switch (text_[at_]) {
      case '{':
        return read_object(depth);
      case '[':
        return read_array(depth);
      case '"':
        return {read_string()};
      case 't':
        return read_word("true", {true});
      case 'f':
        return read_word("false", {false});
      case 'n':
        return read_word("null", {nullptr});
      default:
        return {read_number()};
    }
  }

  Json read_word(std::string_view word, Json value) {
    if (text_.substr(at_, word.size()) != word) fail("a value");
    at_ += word.size();
    return value;
  }

  Json read_object(int depth) {
    Json::Object object;
    need('{');
    if (take('}')) return {std::move(object)};
    do {
      skip_space();
      if (at_ >= text_.size() || text_[at_] != '"') fail("a string");
      std::string key = read_string();
      need(':');
      object.insert_or_assign(std::move(key), read_value(depth + 1));
    } while (take(','));
    need('}');
    return {std::move(object)};
  }

  Json read_array(int depth) {
    Json::Array array;
    need('[');
    if (take(']')) return {std::move(array)};
    do array.push_back(read_value(depth + 1));
    while (take(','));
    need(']');
    return {std::move(array)};
  }

  [[nodiscard]] bool digit() const {
    return at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9';
  }
  void skip_digits() {
    if (!digit()) fail("a digit");
    while (digit()) ++at_;
  }

  double read_number() {
    const std::size_t begin = at_;
    if (at_ < text_.size() && text_[at_] == '-') ++at_;
    if (!digit()) fail("a value");
    if (text_[at_] == '0')
      ++at_;
    else
      skip_digits();
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      skip_digits();
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      ++at_;
      if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
      skip_digits();
    }
    double value = 0;
    const auto result = std::from_chars(text_.data() + begin, text_.data() + at_, value);
    if (result.ec != std::errc{}) fail("a number that fits a double");
    return value;
  }

  std::uint32_t read_hex4() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      if (c >= '0' && c <= '9')
        value = value * 16 + static_cast<std::uint32_t>(c - '0');
      else if (c >= 'a' && c <= 'f')
        value = value * 16 + static_cast<std::uint32_t>(c - 'a' + 10);
      else if (c >= 'A' && c <= 'F')
        value = value * 16 + static_cast<std::uint32_t>(c - 'A' + 10);
      else
        fail("four hexadecimal digits");
    }
    return value;
  }

  static void append_utf8(std::string& out, std::uint32_t code) {
    const auto put = [&out](std::uint32_t byte) { out += static_cast<char>(byte); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xc0 | (code >> 6));
      put(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      put(0xe0 | (code >> 12));
      put(0x80 | ((code >> 6) & 0x3f));
      put(0x80 | (code & 0x3f));
    } else {
      put(0xf0 | (code >> 18));
      put(0x80 | ((code >> 12) & 0x3f));
      put(0x80 | ((code >> 6) & 0x3f));
      put(0x80 | (code & 0x3f));
    }
  }

  std::uint32_t read_escaped_code() {
    const std::uint32_t first = read_hex4();
    if (first < 0xd800 || first > 0xdfff) return first;
    if (first > 0xdbff || text_.substr(at_, 2) != "\\u") fail("a low surrogate");
    at_ += 2;
    const std::uint32_t second = read_hex4();
    if (second < 0xdc00 || second > 0xdfff) fail("a low surrogate");
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
  }

  std::string read_string() {
    std::string out;
    need('"');
    for (;;) {
      if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < 0x20)
        fail("'\"' at the end of a string");
      const char c = text_[at_++];
      if (c == '"') return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      const char kind = at_ < text_.size() ? text_[at_] : '\0';
      ++at_;
      switch (kind) {
        case '"':
        case '\\':
        case '/':
          out += kind;
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'n':
          out += '\n';
          break;
        case 'r':
          out += '\r';
          break;
        case 't':
          out += '\t';
          break;
        case 'u':
          append_utf8(out, read_escaped_code());
          break;
        default:
          --at_;
          fail("an escape");
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

/// Writes JSON in the order of the calls.
class JsonWriter {
 public:
  void begin_object(std::string_view key = {}) { open(key, '{'); }
  void end_object() { close('}'); }
  void begin_array(std::string_view key = {}) { open(key, '['); }
  void end_array() { close(']'); }

  void member(std::string_view key, std::string_view value) {
    prefix(key);
    quote(value);
  }
  void member(std::string_view key, const char* value) { member(key, std::string_view(value)); }
  void member(std::string_view key, double value) {
    prefix(key);
    if (!std::isfinite(value)) {
      out_ += "null";
      return;
    }
    char buffer[40];
    const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
    out_.append(buffer, result.ptr);
  }
  template <class Integer>
  requires std::is_integral_v<Integer>
  void member(std::string_view key, Integer value) {
    prefix(key);
    if constexpr (std::is_same_v<Integer, bool>)
      out_ += value ? "true" : "false";
    else
      out_ += std::to_string(value);
  }

  [[nodiscard]] std::string text() const { return out_ + "\n"; }

  /// \throws OutputError if the file cannot be written whole
  void save(const std::string& path) const {
    OutputFile file(path, Devices::write);
    const std::string content = text();
    file.write(content.data(), content.size());
    file.commit();
  }

 private:
  void newline() {
    out_ += '\n';
    out_.append(2 * depth_, ' ');
  }
  void prefix(std::string_view key) {
    if (!first_) out_ += ',';
    if (depth_ != 0) newline();
    first_ = false;
    if (key.empty()) return;
    quote(key);
    out_ += ": ";
  }
  void open(std::string_view key, char bracket) {
    prefix(key);
    out_ += bracket;
    ++depth_;
    first_ = true;
  }
  void close(char bracket) {
    --depth_;
    if (!first_) newline();
    out_ += bracket;
    first_ = false;
  }
  void quote(std::string_view text) {
    out_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') {
        out_ += '\\';
        out_ += c;
      } else if (c == '\n') {
        out_ += "\\n";
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char buffer[8];
        std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
        out_ += buffer;
      } else {
        out_ += c;
      }
    }
    out_ += '"';
  }

  std::string out_;
  std::size_t depth_ = 0;
  bool first_ = true;
};

}  // namespace examples
