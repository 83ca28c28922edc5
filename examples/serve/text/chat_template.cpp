#include "chat_template.hpp"

#include <nlohmann/json.hpp>
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
    if (role != "system" && role != "user" && role != "assistant" && role != "tool")
      throw std::invalid_argument(field + ": expected system, user, assistant or tool");
  }
}

/// The tags are a template's, what stands in them is not.
void add_tagged(std::vector<TextPart>& parts, const std::string& tag, const std::string& text) {
  parts.push_back({"<" + tag + ">\n", true});
  parts.push_back({text, false});
  parts.push_back({"\n</" + tag + ">", true});
}

/// What a message says: its words, then the tools that it asks for, in Qwen's form.
void add_said(std::vector<TextPart>& parts, const std::string& words, const Message& message) {
  parts.push_back({words, false});
  for (const ToolCall& call : message.calls) {
    if (!words.empty() || &call != message.calls.data()) parts.push_back({"\n", true});
    add_tagged(parts, "tool_call",
               "{\"name\": " + nlohmann::json(call.name).dump() +
                   ", \"arguments\": " + call.arguments + "}");
  }
}

std::vector<TextPart> chatml(std::span<const Message> messages, const std::string& default_system,
                             bool tools_are_users) {
  std::vector<TextPart> parts;
  if (messages[0].role != "system" && !default_system.empty())
    parts.push_back({"<|im_start|>system\n" + default_system + "<|im_end|>\n", true});
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const auto is_answer = [&](std::size_t at) {  // several in a row are one turn
      return tools_are_users && at < messages.size() && messages[at].role == "tool";
    };
    if (!is_answer(i)) {
      parts.push_back({"<|im_start|>" + message.role + "\n", true});
      add_said(parts, message.content, message);
    } else {
      parts.push_back({i > 0 && is_answer(i - 1) ? "\n" : "<|im_start|>user\n", true});
      add_tagged(parts, "tool_response", message.content);
    }
    if (!is_answer(i) || !is_answer(i + 1)) parts.push_back({"<|im_end|>\n", true});
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
    add_said(parts, trimmed(message.content), message);
    parts.push_back({"<|eot_id|>", true});
  }
  parts.push_back({header("assistant"), true});
  return parts;
}

/// User and assistant speak by turns, so neighbours of one side are one text, and where a side is
/// missing it says nothing. A system message is a part of what the user says next.
std::vector<TextPart> llama2(std::span<const Message> messages) {
  std::vector<std::string> turns;  // the user's, the assistant's, the user's, ...
  std::string before;              // what the user says next
  for (const Message& message : messages) {
    if (message.role == "system") {
      before += "<<SYS>>\n" + message.content + "\n<</SYS>>\n\n";
      continue;
    }
    std::vector<TextPart> parts;
    if (message.role == "tool")
      add_tagged(parts, "tool_response", message.content);
    else
      add_said(parts, message.content, message);
    const bool user = message.role != "assistant";
    std::string text = user ? std::exchange(before, {}) : "";
    for (const TextPart& part : parts) text += part.text;
    if (turns.empty() && !user) turns.emplace_back();
    if ((turns.size() % 2 == 0) == user)
      turns.push_back(std::move(text));
    else
      turns.back() += "\n\n" + text;
  }
  if (turns.size() % 2 == 0)
    turns.push_back(before);
  else if (!before.empty())
    turns.back() += "\n\n" + before;
  std::vector<TextPart> parts;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    if (i % 2 == 0) {
      parts.push_back({"<s>", true});
      parts.push_back({"[INST] " + trimmed(turns[i]) + " [/INST]", false});
    } else {
      parts.push_back({std::string(" ").append(trimmed(turns[i])) + " ", false});
      parts.push_back({"</s>", true});
    }
  }
  return parts;
}

}  // namespace

ChatTemplate::ChatTemplate(const Gguf& gguf) : family_(Family::chatml) {
  const std::string_view jinja = gguf.text(template_key);
  if (has(jinja, "<|im_start|>") && has(jinja, "<|im_end|>")) {
    default_system_ = default_system_of(jinja);
    tools_are_users_ = has(jinja, "<tool_response>");
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
      return chatml(messages, default_system_, tools_are_users_);
  }
}

}  // namespace serve
