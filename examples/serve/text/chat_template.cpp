#include "chat_template.hpp"

#include <stdexcept>
#include <utility>

namespace serve {

namespace {

constexpr const char* template_key = "tokenizer.chat_template";

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// Without the white space around it, as templates have it.
std::string trimmed(const std::string& text) {
  constexpr const char* space = " \t\n\v\f\r";
  const std::size_t first = text.find_first_not_of(space);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(space) - first + 1);
}

/// What a ChatML template says by itself where no system message begins the chat.
std::string default_system_of(std::string_view jinja) {
  for (const std::string_view begin : {"'<|im_start|>system\n", "'<|im_start|>system\\n"}) {
    const std::size_t at = jinja.find(begin);
    if (at == std::string_view::npos) continue;
    const std::string_view rest = jinja.substr(at + begin.size());
    const std::size_t end = rest.find("<|im_end|>");
    if (end != std::string_view::npos && !has(rest.substr(0, end), "'"))
      return std::string(rest.substr(0, end));
  }
  return "";
}

void check(std::span<const Message> messages) {
  if (messages.empty()) throw std::invalid_argument("messages = []: expected at least one");
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    const std::string field = "messages[" + std::to_string(i) + "].role = " + role;
    if (role != "system" && role != "user" && role != "assistant")
      throw std::invalid_argument(field + ": expected system, user or assistant");
    if (role == "system" && i != 0)
      throw std::invalid_argument(field + ": expected a system message only as the first");
  }
}

std::vector<TextPart> chatml(std::span<const Message> messages, const std::string& default_system) {
  std::vector<TextPart> parts;
  if (messages[0].role != "system" && !default_system.empty())
    parts.push_back({"<|im_start|>system\n" + default_system + "<|im_end|>\n", true});
  for (const Message& message : messages) {
    parts.push_back({"<|im_start|>" + message.role + "\n", true});
    parts.push_back({message.content, false});
    parts.push_back({"<|im_end|>\n", true});
  }
  parts.push_back({"<|im_start|>assistant\n", true});
  return parts;
}

std::vector<TextPart> llama3(std::span<const Message> messages) {
  const auto header = [](const std::string& role) {
    return "<|start_header_id|>" + role + "<|end_header_id|>\n\n";
  };
  std::vector<TextPart> parts{{"<|begin_of_text|>", true}};
  for (const Message& message : messages) {
    parts.push_back({header(message.role), true});
    parts.push_back({trimmed(message.content), false});
    parts.push_back({"<|eot_id|>", true});
  }
  parts.push_back({header("assistant"), true});
  return parts;
}

/// A system message is a part of the first thing that the user says.
std::vector<TextPart> llama2(std::span<const Message> messages) {
  std::vector<TextPart> parts;
  std::string system;
  if (messages[0].role == "system") {
    system = "<<SYS>>\n" + messages[0].content + "\n<</SYS>>\n\n";
    messages = messages.subspan(1);
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const bool user = i % 2 == 0;
    if ((messages[i].role == "user") != user)
      throw std::invalid_argument("messages: expected user and assistant by turns");
    if (user) {
      parts.push_back({"<s>", true});
      parts.push_back(
          {"[INST] " + trimmed((i == 0 ? system : "") + messages[i].content) + " [/INST]", false});
    } else {
      parts.push_back({" " + trimmed(messages[i].content) + " ", false});
      parts.push_back({"</s>", true});
    }
  }
  if (messages.size() % 2 == 0)
    throw std::invalid_argument("messages: expected the user's as the last");
  return parts;
}

}  // namespace

ChatTemplate::ChatTemplate(const Gguf& gguf) : family_(Family::chatml) {
  const std::string_view jinja = gguf.text(template_key);
  if (has(jinja, "<|im_start|>") && has(jinja, "<|im_end|>")) {
    default_system_ = default_system_of(jinja);
  } else if (has(jinja, "<|start_header_id|>") && has(jinja, "<|eot_id|>")) {
    family_ = Family::llama3;
    if (has(jinja, "Cutting Knowledge Date"))
      gguf.fail(template_key, "one that puts dates into each prompt (Llama 3.1 and later)",
                "ChatML, Llama 2 or Llama 3");
  } else if (has(jinja, "[INST]") && has(jinja, "<<SYS>>")) {
    family_ = Family::llama2;
  } else {
    gguf.fail(template_key, std::string(jinja.substr(0, 60)) + "…", "ChatML, Llama 2 or Llama 3");
  }
}

std::vector<TextPart> ChatTemplate::prompt(std::span<const Message> messages) const {
  check(messages);
  switch (family_) {
    case Family::llama2:
      return llama2(messages);
    case Family::llama3:
      return llama3(messages);
    default:
      return chatml(messages, default_system_);
  }
}

}  // namespace serve
