#include "api_messages.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

namespace serve {

namespace {

using Json = nlohmann::json;

/// What replies have beside what they say, here and elsewhere, and who is who: nothing that a
/// template has a field for.
constexpr std::string_view unsaid[] = {
    "annotations",       "id",   "name",   "parsed",      "reasoning", "reasoning_content",
    "reasoning_details", "role", "status", "tool_call_id"};
/// What is read.
constexpr std::string_view said[] = {"audio", "content", "function_call", "refusal", "tool_calls"};

template <std::size_t N>
bool is_among(const std::string_view (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

/// The text of a member; null where there is none.
const std::string* text_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? &found->get_ref<const std::string&>()
                                                     : nullptr;
}

/// A message of one of OpenAI's roles, field by field.
class MessageReader {
 public:
  MessageReader(const Fields& fields, const Json& message, std::string where)
      : fields_(fields), message_(message), where_(std::move(where)) {}

  [[nodiscard]] Message read() const {
    if (!message_.is_object()) fields_.fail(where_, message_, "{\"role\": …, \"content\": …}");
    Message message{role(), ""};
    for (const auto& [name, value] : message_.items())
      if (!is_among(unsaid, name) && !is_among(said, name) && !stands_for_nothing(value))
        fields_.fail(where_ + "." + name, value, "nothing: no field of this name is known here");
    message.content = content(message.role == "assistant", message.role == "tool");
    if (message.role == "assistant") message.calls = calls();
    return message;
  }

 private:
  [[nodiscard]] std::string role() const {
    const std::string* role = text_of(message_, "role");
    for (const char* name : {"system", "user", "assistant", "tool"})
      if (role != nullptr && *role == name) return name;
    if (role != nullptr && *role == "developer") return "system";
    if (role != nullptr && *role == "function") return "tool";
    const auto found = message_.find("role");
    fields_.fail(where_ + ".role", found == message_.end() ? Json() : *found,
                 "system, developer, user, assistant, tool or function");
  }

  /// A string, or a list of parts. An assistant may have said nothing, or refused, or spoken aloud.
  [[nodiscard]] std::string content(bool assistant, bool tool) const {
    const char* expected = "a string, or a list of {\"type\": \"text\", \"text\": …}";
    const std::string field = where_ + ".content";
    const auto content = message_.find("content");
    if (content == message_.end() || content->is_null()) {
      if (!assistant && !tool) fields_.fail(field, Json(), expected);
      const std::string* text = text_of(message_, "refusal");
      const auto audio = message_.find("audio");
      if (text == nullptr && audio != message_.end() && audio->is_object())
        text = text_of(*audio, "transcript");
      return text != nullptr ? *text : "";
    }
    if (content->is_string()) return content->get<std::string>();
    if (!content->is_array()) fields_.fail(field, *content, expected);
    std::string all;
    for (std::size_t i = 0; i < content->size(); ++i) {
      const Json& part = (*content)[i];
      const std::string* type = part.is_object() ? text_of(part, "type") : nullptr;
      const bool refusal = assistant && type != nullptr && *type == "refusal";
      const std::string* text = nullptr;
      if (refusal || (type != nullptr && *type == "text"))
        text = text_of(part, refusal ? "refusal" : "text");
      if (text == nullptr)
        fields_.fail(fmt::format("{}[{}]", field, i), part, "{\"type\": \"text\", \"text\": …}");
      all += *text;
    }
    return all;
  }

  [[nodiscard]] std::vector<ToolCall> calls() const {
    std::vector<ToolCall> calls;
    const auto older = message_.find("function_call"), all = message_.find("tool_calls");
    if (older != message_.end() && !older->is_null())
      calls.push_back(call(*older, "arguments", where_ + ".function_call"));
    if (all == message_.end() || all->is_null()) return calls;
    const std::string field = where_ + ".tool_calls";
    if (!all->is_array()) fields_.fail(field, *all, "a list");
    for (std::size_t i = 0; i < all->size(); ++i) {
      const Json& one = (*all)[i];
      const std::string in_list = fmt::format("{}[{}]", field, i);
      const bool custom = one.is_object() && one.contains("custom");
      const char* kind = custom ? "custom" : "function";
      if (!one.is_object() || !one.contains(kind))
        fields_.fail(in_list, one, "{\"type\": \"function\", \"function\": …}");
      calls.push_back(call(one.at(kind), custom ? "input" : "arguments", in_list + "." + kind));
    }
    return calls;
  }

  /// \param given  the member with what the tool is given: a text, of functions one that is JSON
  [[nodiscard]] ToolCall call(const Json& one, const char* given, const std::string& field) const {
    const std::string* name = one.is_object() ? text_of(one, "name") : nullptr;
    if (name == nullptr) fields_.fail(field, one, "an object with the name of a tool");
    const auto found = one.find(given);
    if (found == one.end() || found->is_null()) return {*name, "{}"};
    const bool is_json = found->is_string() && given == std::string_view("arguments");
    std::string text = is_json ? found->get<std::string>() : found->dump();
    return {*name, text.empty() ? "{}" : std::move(text)};
  }

  const Fields& fields_;
  const Json& message_;
  const std::string where_;
};

}  // namespace

std::vector<Message> read_messages(const Fields& fields) {
  const Json* value = fields.find("messages");
  if (value == nullptr || !value->is_array() || value->empty())
    fields.fail("messages", value == nullptr ? Json() : *value, "a list of at least one message");
  std::vector<Message> messages;
  for (std::size_t i = 0; i < value->size(); ++i)
    messages.push_back(MessageReader(fields, (*value)[i], fmt::format("messages[{}]", i)).read());
  return messages;
}

}  // namespace serve
