#include "json_fields.hpp"

#include <fmt/format.h>

#include "../../support/json_text.hpp"
#include "api_error.hpp"

namespace serve {

namespace {

constexpr std::size_t most_structures = 1 << 16;

/// A value for a message: short, and never a large tree.
std::string shown(const nlohmann::json& value) {
  if (value.is_object()) return "{…}";
  if (value.is_array()) return value.empty() ? "[]" : "[…]";
  const std::string text = value.dump();
  if (text.size() <= 60) return text;
  std::size_t end = 56;  // not within a character
  while ((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "…";
}

}  // namespace

nlohmann::json parse_object(std::string_view body) {
  try {
    nlohmann::json object = examples::read_json(body, {.structures = most_structures});
    if (object.is_object()) return object;
    throw ApiError(400, fmt::format("the body is {}: expected an object", object.type_name()));
  } catch (const examples::JsonError& error) {
    const std::string& field = error.field();
    if (!error.is_syntax())
      throw ApiError(400, fmt::format("{}: {}", field.empty() ? "the body" : field, error.what()),
                     field);
    const std::string where = field.empty() ? "" : fmt::format(" (in {} or behind it)", field);
    throw ApiError(400, fmt::format("the body is not JSON: {}{}", error.what(), where), field);
  }
}

bool stands_for_nothing(const nlohmann::json& value) {
  return value.is_null() || value == false || value == "" ||
         (value.is_structured() && value.empty());
}

void Fields::fail(const std::string& name, const nlohmann::json& value,
                  const std::string& expected) const {
  throw ApiError(400, fmt::format("{} = {}: expected {}", name, shown(value), expected), name);
}

const nlohmann::json* Fields::find(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool Fields::boolean(const char* name, bool otherwise) const {
  const auto* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) fail(name, *value, "true or false");
  return value->get<bool>();
}

long long Fields::integer(const char* name, long long least, long long most,
                          long long otherwise) const {
  const auto* value = find(name);
  if (value == nullptr) return otherwise;
  // One that is beyond 64 bits was parsed as a double, or as unsigned.
  const bool fits = value->is_number_integer() && (!value->is_number_unsigned() ||
                                                   value->get<unsigned long long>() <= 1ull << 62);
  if (!fits || value->get<long long>() < least || value->get<long long>() > most)
    fail(name, *value, fmt::format("an integer from {} to {}", least, most));
  return value->get<long long>();
}

double Fields::number(const char* name, double least, double most, double otherwise) const {
  const auto* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most))
    fail(name, *value, fmt::format("a number from {} to {}", least, most));
  return value->get<double>();
}

std::string Fields::text(const char* name, std::size_t most_bytes) const {
  const auto* value = find(name);
  if (value == nullptr) return "";
  if (!value->is_string() || value->get_ref<const std::string&>().size() > most_bytes)
    fail(name, *value, fmt::format("a string of at most {} bytes", most_bytes));
  return value->get<std::string>();
}

}  // namespace serve
