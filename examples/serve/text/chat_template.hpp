// Chats as prompts. Files bring a template as a program in Jinja; three families of them are known
// here by their marks and written out, and nothing else is guessed at.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../model/gguf.hpp"
#include "tokenizer.hpp"

namespace serve {

struct Message {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

class ChatTemplate {
 public:
  enum class Family { chatml, llama2, llama3 };

  /// \throws FileError: the key and what was expected, where the template is of no known family
  explicit ChatTemplate(const Gguf& gguf);
  explicit ChatTemplate(Family family, std::string default_system = "")
      : family_(family), default_system_(std::move(default_system)) {}

  [[nodiscard]] Family family() const { return family_; }
  /// The prompt after which the assistant speaks, special tokens included. What is said in messages
  /// is not trusted. \throws std::invalid_argument that names the message
  [[nodiscard]] std::vector<TextPart> prompt(std::span<const Message> messages) const;

 private:
  Family family_;
  std::string default_system_;  ///< ChatML: what stands before chats without a system message
};

}  // namespace serve
