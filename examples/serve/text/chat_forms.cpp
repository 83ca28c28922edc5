#include "chat_forms.hpp"

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "unicode.hpp"

namespace serve {

namespace {

/// The tags are a template's, what stands in them is not.
void add_tagged(TextParts& parts, const std::string& tag, const std::string& text) {
  parts.push_back({"<" + tag + ">\n", true});
  parts.push_back({text, false});
  parts.push_back({"\n</" + tag + ">", true});
}

/// What a message says: its words, then the tools that it asks for, in Qwen's form.
void add_said(TextParts& parts, const std::string& words, const Message& message) {
  parts.push_back({words, false});
  for (const ToolCall& call : message.calls) {
    if (!words.empty() || &call != message.calls.data()) parts.push_back({"\n", true});
    add_tagged(parts, "tool_call",
               "{\"name\": " + nlohmann::json(call.name).dump() +
                   ", \"arguments\": " + call.arguments + "}");
  }
}

[[noreturn]] void refuse(std::size_t index, const std::string& role, const std::string& expected) {
  throw std::invalid_argument("messages[" + std::to_string(index) + "].role = " + role +
                              ": expected " + expected);
}

/// A system message at the beginning, for models that have one there.
const Message* first_system(Messages messages) {
  return messages.front().role == "system" ? messages.data() : nullptr;
}

/// Every second message is a user's, the first is.
/// \param first  of the messages that this is said of
void check_turns(Messages messages, std::size_t first) {
  for (std::size_t i = first; i < messages.size(); ++i)
    if ((messages[i].role == "user") != ((i - first) % 2 == 0))
      refuse(i, messages[i].role,
             (i - first) % 2 == 0
                 ? "user: with this model, user and assistant speak by turns"
                 : "assistant: with this model, user and assistant speak by turns");
}

}  // namespace

TextParts chatml_prompt(Messages messages, const ChatMlForm& form) {
  TextParts parts;
  if (messages[0].role != "system" && !form.default_system.empty())
    parts.push_back({"<|im_start|>system\n" + form.default_system + "<|im_end|>\n", true});
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const auto is_answer = [&](std::size_t at) {  // several in a row are one turn
      return form.tools_are_users && at < messages.size() && messages[at].role == "tool";
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

/// User and assistant speak by turns, so neighbours of one side are one text, and where a side is
/// missing it says nothing. A system message is a part of what the user says next.
TextParts llama2_prompt(Messages messages) {
  std::vector<std::string> turns;  // the user's, the assistant's, the user's, ...
  std::string before;              // what the user says next
  for (const Message& message : messages) {
    if (message.role == "system") {
      before += "<<SYS>>\n" + message.content + "\n<</SYS>>\n\n";
      continue;
    }
    TextParts parts;
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
  TextParts parts;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const std::string said(stripped(turns[i]));
    if (i % 2 == 0) {
      parts.push_back({"<s>", true});
      parts.push_back({"[INST] " + said + " [/INST]", false});
    } else {
      parts.push_back({" " + said + " ", false});
      parts.push_back({"</s>", true});
    }
  }
  return parts;
}

namespace {

std::string llama3_header(const std::string& role) {
  return "<|start_header_id|>" + role + "<|end_header_id|>\n\n";
}

}  // namespace

TextParts llama3_prompt(Messages messages) {
  TextParts parts{{"<|begin_of_text|>", true}};
  for (const Message& message : messages) {
    parts.push_back({llama3_header(message.role), true});
    add_said(parts, std::string(stripped(message.content)), message);
    parts.push_back({"<|eot_id|>", true});
  }
  parts.push_back({llama3_header("assistant"), true});
  return parts;
}

namespace {

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm day{};
  char text[32];
  ::localtime_r(&now, &day);
  return {text, std::strftime(text, sizeof text, "%d %b %Y", &day)};
}

}  // namespace

TextParts llama31_prompt(Messages messages, const Llama31Form& form) {
  TextParts parts{{"<|begin_of_text|>" + llama3_header("system") +
                       "Cutting Knowledge Date: December 2023\nToday Date: " +
                       (form.date.empty() ? today() : form.date) + "\n\n",
                   true}};
  const Message* const system = first_system(messages);
  if (system != nullptr) parts.push_back({std::string(stripped(system->content)), false});
  parts.push_back({"<|eot_id|>", true});
  for (std::size_t i = system != nullptr ? 1 : 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const bool is_answer = message.role == "tool";
    parts.push_back({llama3_header(is_answer ? "ipython" : message.role), true});
    if (message.calls.size() > 1)
      throw std::invalid_argument("messages[" + std::to_string(i) +
                                  "].tool_calls = " + std::to_string(message.calls.size()) +
                                  " of them: expected one, as this model asks for");
    if (is_answer)
      parts.push_back({nlohmann::json(message.content).dump(), false});
    else if (message.calls.empty())
      parts.push_back({std::string(stripped(message.content)), false});
    else
      parts.push_back({"{\"name\": \"" + message.calls[0].name +
                           "\", \"parameters\": " + message.calls[0].arguments + "}",
                       false});
    parts.push_back({"<|eot_id|>", true});
  }
  parts.push_back({llama3_header("assistant"), true});
  return parts;
}

TextParts gemma_prompt(Messages messages, const GemmaForm& form) {
  const Message* const system = first_system(messages);
  if (system != nullptr && !form.takes_system)
    refuse(0, "system", "user: this model has no system messages");
  const std::size_t first = system != nullptr ? 1 : 0;
  check_turns(messages, first);
  TextParts parts{{"<bos>", true}};
  for (std::size_t i = first; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const std::string role = message.role == "assistant" ? "model" : message.role;
    parts.push_back({"<start_of_turn>" + role + "\n", true});
    if (system != nullptr && i == first) parts.push_back({system->content + "\n\n", false});
    add_said(parts, std::string(stripped(message.content)), message);
    parts.push_back({"<end_of_turn>\n", true});
  }
  parts.push_back({"<start_of_turn>model\n", true});
  return parts;
}

TextParts mistral_prompt(Messages messages, const MistralForm& form) {
  using System = MistralForm::System;
  const Message* const system = first_system(messages);
  if (system != nullptr && form.system == System::none)
    refuse(0, "system", "user: this model has no system messages");
  const std::size_t first = system != nullptr ? 1 : 0;
  check_turns(messages, first);
  for (std::size_t i = first; i < messages.size(); ++i)
    if (messages[i].role != "user" && messages[i].role != "assistant")
      refuse(i, messages[i].role, "user or assistant: this model has no others here");
  // Where the last message is an assistant's, no user's is the last one.
  const std::size_t last = messages.size() - 1;
  const std::size_t last_user = messages[last].role == "user" ? last : last - 1;
  const auto has_system = [&](std::size_t i) {
    if (system == nullptr) return false;
    if (form.system == System::first) return i == first;
    if (form.system == System::last) return i == last;
    return messages[i].content == messages[last_user].content;  // the template compares them
  };
  TextParts parts{{"<s>", true}};
  for (std::size_t i = first; i < messages.size(); ++i) {
    const Message& message = messages[i];
    if (message.role == "user") {
      parts.push_back({form.before_user, true});
      if (has_system(i)) parts.push_back({system->content + "\n\n", false});
      parts.push_back({message.content, false});
      parts.push_back({form.after_user, true});
    } else {
      parts.push_back({form.before_reply, true});
      add_said(parts, form.trims_reply ? std::string(stripped(message.content)) : message.content,
               message);
      parts.push_back({"</s>" + form.after_reply, true});
    }
  }
  return parts;
}

TextParts phi3_prompt(Messages messages, const Phi3Form& form) {
  TextParts parts;
  if (form.begins_with_bos) parts.push_back({"<s>", true});
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    if (message.role == "tool")
      refuse(i, "tool", "system, user or assistant: this model has no others");
    if (message.role == "system" && !form.takes_system)
      refuse(i, "system", "user or assistant: this model has no system messages");
    if (message.role == "system" && form.skips_empty_system && message.content.empty()) continue;
    if (message.role != "assistant" || !form.reply_follows_user)
      parts.push_back({"<|" + message.role + "|>\n", true});
    add_said(parts, message.content, message);
    parts.push_back({"<|end|>\n", true});
    if (message.role == "user" && form.reply_follows_user)
      parts.push_back({"<|assistant|>\n", true});
  }
  if (!form.reply_follows_user) parts.push_back({"<|assistant|>\n", true});
  return parts;
}

}  // namespace serve
