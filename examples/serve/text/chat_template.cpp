#include "chat_template.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

namespace serve {

namespace {

constexpr const char* template_key = "tokenizer.chat_template";

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// A text of a template with one kind of quotation marks, and with line ends written as \n, however
/// it has them.
std::string uniform(std::string_view jinja) {
  std::string text;
  for (const char c : jinja) {
    if (c == '\n')
      text += "\\n";
    else
      text += c == '"' ? '\'' : c;
  }
  return text;
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

/// Of Llama 3.1 and 3.3 the date that stands in it, of 3.2 the day's; nothing where it is another
/// one.
std::optional<Llama31Form> llama31_form(const std::string& text) {
  if (!has(text, "'Cutting Knowledge Date: December 2023\\n'")) return std::nullopt;
  if (has(text, "strftime_now('%d %b %Y')")) return Llama31Form{};
  constexpr std::string_view begin = "date_string = '";
  const std::size_t at = text.find(begin);
  if (at == std::string::npos) return std::nullopt;
  const std::size_t end = text.find('\'', at + begin.size());
  return Llama31Form{text.substr(at + begin.size(), end - at - begin.size())};
}

std::optional<GemmaForm> gemma_form(const std::string& text) {
  if (has(text, "raise_exception('System role not supported')")) return GemmaForm{false};
  if (has(text, "first_user_prefix = messages[0]['content'] + '\\n\\n'")) return GemmaForm{true};
  return std::nullopt;
}

/// Versions differ in spaces, and in where a system message stands.
std::optional<MistralForm> mistral_form(const std::string& text) {
  MistralForm form;
  const auto first_of = [&](std::initializer_list<const char*> all) {
    const auto* const found = std::find_if(
        all.begin(), all.end(), [&](const std::string& one) { return has(text, "'" + one + "'"); });
    return found == all.end() ? "" : std::string(*found);
  };
  form.before_user = first_of({" [INST] ", "[INST] ", "[INST]"});
  form.after_user = first_of({" [/INST]", "[/INST]"});
  const std::string reply = "message['content']";
  form.trims_reply = has(text, reply + "|trim + eos_token");
  const auto space_if = [](bool is_there) { return std::string(is_there ? 1 : 0, ' '); };
  form.before_reply = space_if(has(text, "' ' + " + reply));
  form.after_reply = space_if(has(text, "eos_token + ' '"));
  const bool is_read = form.trims_reply || has(text, reply + " + eos_token");
  using System = MistralForm::System;
  const std::string defined = " and system_message is defined";
  if (has(text, "loop.first" + defined))
    form.system = System::first;
  else if (has(text, "loop.last" + defined))
    form.system = System::last;
  else if (has(text, "(message == user_messages[-1])" + defined))
    form.system = System::last_user;
  else if (has(text, "system_message"))
    return std::nullopt;
  const bool is_another = has(text, "bos_token +") || has(text, "[SYSTEM_PROMPT]");
  if (form.before_user.empty() || form.after_user.empty() || !is_read || is_another)
    return std::nullopt;
  return form;
}

std::optional<Phi3Form> phi3_form(const std::string& text) {
  const auto has_turn = [&](const std::string& role) {
    return has(text, "'<|" + role + "|>\\n' + message['content'] + '<|end|>\\n'") ||
           has(text, "'<|" + role + "|>' + '\\n' + message['content'] + '<|end|>' + '\\n'");
  };
  Phi3Form form;
  form.begins_with_bos = has(text, "bos_token");
  form.takes_system = has_turn("system");
  form.skips_empty_system = has(text, "== 'system' and message['content']");
  form.reply_follows_user = !has_turn("assistant");
  if (!has_turn("user")) return std::nullopt;
  if (form.reply_follows_user && !has(text, "'<|end|>' + '\\n' + '<|assistant|>' + '\\n'"))
    return std::nullopt;
  return form;
}

void check(Messages messages) {
  if (messages.empty()) throw std::invalid_argument("messages = []: expected at least one");
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    const std::string field = "messages[" + std::to_string(i) + "].role = " + role;
    if (role != "system" && role != "user" && role != "assistant" && role != "tool")
      throw std::invalid_argument(field + ": expected system, user, assistant or tool");
  }
}

}  // namespace

ChatTemplate ChatTemplate::recognised(std::string_view jinja) {
  const std::string text = uniform(jinja);
  const auto with = [](auto write, auto form) -> Form {
    if (!form) return nullptr;
    return [write, form = *form](Messages messages) { return write(messages, form); };
  };
  if (has(text, "<|im_start|>") && has(text, "<|im_end|>"))
    return {Family::chatml,
            with(chatml_prompt, std::optional(ChatMlForm{default_system_of(jinja),
                                                         has(text, "<tool_response>")}))};
  if (has(text, "<|start_header_id|>") && has(text, "<|eot_id|>")) {
    if (!has(text, "Cutting Knowledge Date")) return {Family::llama3, llama3_prompt};
    return {Family::llama31, with(llama31_prompt, llama31_form(text))};
  }
  if (has(text, "[INST]") && has(text, "<<SYS>>")) return {Family::llama2, llama2_prompt};
  if (has(text, "<start_of_turn>") && has(text, "<end_of_turn>"))
    return {Family::gemma, with(gemma_prompt, gemma_form(text))};
  if (has(text, "[INST]")) return {Family::mistral, with(mistral_prompt, mistral_form(text))};
  return {Family::phi3, with(phi3_prompt, phi3_form(text))};
}

ChatTemplate::ChatTemplate(const Gguf& gguf) : ChatTemplate(recognised(gguf.text(template_key))) {
  if (!form_)
    gguf.fail(
        template_key, std::string(gguf.text(template_key).substr(0, 60)) + "…",
        "ChatML, or that of Llama 2 to 3.3, Gemma 2 or 3, Mistral up to 0.3 and Nemo, or Phi-3");
}

ChatTemplate::ChatTemplate(Family family) : family_(family) {
  switch (family) {
    case Family::chatml:
      form_ = [](Messages messages) { return chatml_prompt(messages, {}); };
      break;
    case Family::llama2:
      form_ = llama2_prompt;
      break;
    case Family::llama3:
      form_ = llama3_prompt;
      break;
    default:
      throw std::invalid_argument("family: expected ChatML, Llama 2 or Llama 3");
  }
}

std::vector<TextPart> ChatTemplate::prompt(std::span<const Message> messages) const {
  check(messages);
  return form_(messages);
}

}  // namespace serve
