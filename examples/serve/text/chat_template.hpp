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

/// A tool that an assistant has asked for.
struct ToolCall {
  std::string name;
  std::string arguments;  ///< JSON
};

struct Message {
  std::string role;  ///< "system", "user", "assistant", or "tool": what one has answered
  std::string content;
  std::vector<ToolCall> calls = {};  ///< an assistant's
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
  /// is not trusted. What a family has no form for, serve.md says.
  /// \throws std::invalid_argument that names the message
  [[nodiscard]] std::vector<TextPart> prompt(std::span<const Message> messages) const;

 private:
  Family family_;
  std::string default_system_;    ///< ChatML: what stands before chats without a system message
  bool tools_are_users_ = false;  ///< ChatML: answers of tools stand in the user's turn, as Qwen's
};

}  // namespace serve
