// Messages of failures.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// A piece of a message: text or a number. Call sites only list pieces; the code that joins them is
/// compiled once, for size.
class MessagePart {
 public:
  MessagePart(const char* text) : text_(text) {}
  MessagePart(std::string_view text) : text_(text) {}
  MessagePart(const std::string& text) : text_(text) {}
  MessagePart(const void* pointer) : text_(pointer == nullptr ? "null" : "non-null") {}
  MessagePart(std::signed_integral auto number) : kind_(Kind::integer), integer_(number) {}
  MessagePart(std::unsigned_integral auto number) : kind_(Kind::count), count_(number) {}
  MessagePart(float number) : MessagePart(static_cast<double>(number)) {}
  MessagePart(double number) : kind_(Kind::real), real_(number) {}

  [[nodiscard]] std::string string() const;

 private:
  enum class Kind { text, integer, count, real };

  Kind kind_ = Kind::text;
  std::string_view text_;
  long long integer_ = 0;
  unsigned long long count_ = 0;
  double real_ = 0;
};
using MessageParts = std::initializer_list<MessagePart>;

#if CHUNKATTN_BODIES
CHUNKATTN_COLD CHUNKATTN_FUNCTION std::string MessagePart::string() const {
  if (kind_ == Kind::integer) return std::to_string(integer_);
  if (kind_ == Kind::count) return std::to_string(count_);
  if (kind_ == Kind::real) return std::to_string(real_);
  return std::string(text_);
}

CHUNKATTN_COLD CHUNKATTN_FUNCTION std::string joined(MessageParts pieces) {
  std::string message;
  for (const MessagePart& piece : pieces) message += piece.string();
  return message;
}
#else
std::string joined(MessageParts pieces);
#endif

}  // namespace detail
CHUNKATTN_NAMESPACE_END
