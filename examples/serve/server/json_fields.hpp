// JSON that strangers send: parsed within limits, read by name and type.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace serve {

/// The object that a body is. \throws ApiError with status 400 for what is no JSON, no UTF-8, no
/// object,
///         nested too deeply, has numbers beyond double, or too many lists and objects; names the
///         field where it was found
[[nodiscard]] nlohmann::json parse_object(std::string_view body);

/// null, false and what is empty: of a field that is not known, no reason to refuse it.
[[nodiscard]] bool stands_for_nothing(const nlohmann::json& value);

/// The fields of an object. null counts as absent. Each function throws an ApiError with status 400
/// that names the field, its value and what was expected.
class Fields {
 public:
  /// \param object  outlives this
  explicit Fields(const nlohmann::json& object) : object_(object) {}

  [[nodiscard]] const nlohmann::json& all() const { return object_; }
  /// The field's value, or null.
  [[nodiscard]] const nlohmann::json* find(const char* name) const;
  [[nodiscard]] bool boolean(const char* name, bool otherwise) const;
  [[nodiscard]] long long integer(const char* name, long long least, long long most,
                                  long long otherwise) const;
  [[nodiscard]] double number(const char* name, double least, double most, double otherwise) const;
  [[nodiscard]] std::string text(const char* name, std::size_t most_bytes) const;
  /// What stands there is not as it should be.
  [[noreturn]] void fail(const std::string& name, const nlohmann::json& value,
                         const std::string& expected) const;

 private:
  const nlohmann::json& object_;
};

}  // namespace serve
