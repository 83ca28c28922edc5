// JSON that others have written, read within limits: the library prints values by recursion, for
// which 100,000 nested lists leave no stack.
#pragma once

#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace examples {

struct JsonLimits {
  int levels = 32;                                                     ///< of lists and objects
  std::size_t structures = (std::numeric_limits<std::size_t>::max)();  ///< lists and objects
};

/// What is wrong with a text: it is no JSON, or beyond the limits.
class JsonError : public std::runtime_error {
 public:
  /// \param byte   where a text stops to be JSON, counted from 1; 0: it is beyond the limits
  /// \param field  the outermost object's that was begun last, or empty
  JsonError(const std::string& message, std::size_t byte, std::string field)
      : std::runtime_error(message), byte_(byte), field_(std::move(field)) {}

  [[nodiscard]] bool is_syntax() const noexcept { return byte_ > 0; }
  [[nodiscard]] std::size_t byte() const noexcept { return byte_; }
  [[nodiscard]] const std::string& field() const noexcept { return field_; }

 private:
  std::size_t byte_;
  std::string field_;
};

/// What an exception of the library says, without its name and number.
[[nodiscard]] inline std::string message_of(const nlohmann::json::exception& error) {
  const std::string text = error.what();  // "[its name and number] parse error at ..."
  return text.substr(text.find("] ") + 2);
}

namespace detail {

/// Looks through a text and throws what is wrong with it, before anything is built of it. (A
/// callback of parse() would do, but at the end of each element the library looks through all of
/// its list then.)
class JsonCheck final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit JsonCheck(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    if (depth_ == 1) field_ = name;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string&,
                   const nlohmann::json::exception& error) override {
    throw JsonError(message_of(error), byte > 0 ? byte : 1, field_);
  }

 private:
  bool enter() {
    if (++depth_ > limits_.levels)
      throw JsonError("nested more than " + std::to_string(limits_.levels) + " levels deep", 0,
                      field_);
    if (++structures_ > limits_.structures)
      throw JsonError(
          "expected at most " + std::to_string(limits_.structures) + " lists and objects", 0,
          field_);
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }

  JsonLimits limits_;
  int depth_ = 0;
  std::size_t structures_ = 0;
  std::string field_;
};

}  // namespace detail

/// The value that a text is. \throws JsonError
[[nodiscard]] inline nlohmann::json read_json(std::string_view text,
                                              const JsonLimits& limits = {}) {
  detail::JsonCheck check(limits);
  nlohmann::json::sax_parse(text, &check);
  return nlohmann::json::parse(text);
}

}  // namespace examples
