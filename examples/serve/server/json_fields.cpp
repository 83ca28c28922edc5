#include "json_fields.hpp"

#include <fmt/format.h>

#include "api_error.hpp"

namespace serve {

namespace {

constexpr int most_levels = 32;
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

/// Looks through a body and throws what is wrong with it, before anything is built of it. (A
/// callback of parse() would do, but at the end of each element the library looks through all of
/// its list then.)
class Limits final : public nlohmann::json_sax<nlohmann::json> {
 public:
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
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::json::exception& error) override {
    const std::string text = error.what();  // "[its name and number] parse error at ..."
    const std::string where = field_.empty() ? "" : fmt::format(" (in {} or behind it)", field_);
    fail(fmt::format("the body is not JSON: {}{}", text.substr(text.find("] ") + 2), where));
  }

 private:
  bool enter() {
    if (++depth_ > most_levels)
      fail(fmt::format("{}: nested more than {} levels deep", where(), most_levels));
    if (++structures_ > most_structures)
      fail(fmt::format("{}: expected at most {} lists and objects in a body", where(),
                       most_structures));
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  [[nodiscard]] std::string where() const { return field_.empty() ? "the body" : field_; }
  [[noreturn]] void fail(const std::string& message) const { throw ApiError(400, message, field_); }

  int depth_ = 0;
  std::size_t structures_ = 0;
  std::string field_;  // the outermost that was begun last
};

}  // namespace

nlohmann::json parse_object(std::string_view body) {
  Limits limits;
  nlohmann::json::sax_parse(body, &limits);
  nlohmann::json object = nlohmann::json::parse(body);
  if (!object.is_object())
    throw ApiError(400, fmt::format("the body is {}: expected an object", object.type_name()));
  return object;
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
