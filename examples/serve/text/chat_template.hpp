// Chats as prompts. Files bring a template as a program in Jinja; some families of them are known
// here by their marks and written out, and nothing else is guessed at.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../model/gguf.hpp"
#include "chat_forms.hpp"
#include "tokenizer.hpp"

namespace serve {

class ChatTemplate {
 public:
  enum class Family { chatml, llama2, llama3, llama31, gemma, mistral, phi3 };

  /// \throws FileError: the key and what was expected, where the template is of no known family
  explicit ChatTemplate(const Gguf& gguf);
  /// ChatML, Llama 2 or 3, whose templates differ in nothing else. The others read theirs.
  explicit ChatTemplate(Family family);

  [[nodiscard]] Family family() const { return family_; }
  /// The prompt after which the assistant speaks, special tokens included. What is said in messages
  /// is not trusted. What a family has no form for, serve.md says.
  /// \throws std::invalid_argument that names the message
  [[nodiscard]] std::vector<TextPart> prompt(std::span<const Message> messages) const;

 private:
  using Form = std::function<std::vector<TextPart>(std::span<const Message>)>;
  ChatTemplate(Family family, Form form) : family_(family), form_(std::move(form)) {}
  /// The family of a template and how it writes; without a form where it is of none.
  static ChatTemplate recognised(std::string_view jinja);

  Family family_;
  Form form_;
};

}  // namespace serve
