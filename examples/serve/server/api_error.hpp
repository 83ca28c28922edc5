// An error as OpenAI's API words it.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace serve {

class ApiError : public std::runtime_error {
 public:
  /// \param status  of HTTP
  /// \param param  the field that is wrong; empty: none
  /// \param code  for programs; empty: none
  ApiError(int status, const std::string& message, std::string param = "", std::string code = "")
      : std::runtime_error(message),
        status_(status),
        param_(std::move(param)),
        code_(std::move(code)) {}

  [[nodiscard]] int status() const { return status_; }
  [[nodiscard]] const std::string& param() const { return param_; }
  [[nodiscard]] const std::string& code() const { return code_; }
  /// {"error": {"message", "type", "param", "code"}}, in valid UTF-8 whatever the message repeats
  [[nodiscard]] std::string body() const {
    const auto text = [](const std::string& s) {
      return s.empty() ? nlohmann::json() : nlohmann::json(s);
    };
    const char* type = status_ >= 500   ? "server_error"
                       : status_ == 429 ? "rate_limit_error"
                                        : "invalid_request_error";
    const nlohmann::json all{
        {"error",
         {{"message", what()}, {"type", type}, {"param", text(param_)}, {"code", text(code_)}}}};
    return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

 private:
  int status_;
  std::string param_, code_;
};

}  // namespace serve
