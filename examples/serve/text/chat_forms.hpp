// How families of models write chats. Each function gives the prompt after which the assistant
// speaks; what differs within a family is in its form.
#pragma once

#include <span>
#include <string>
#include <vector>

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

using Messages = std::span<const Message>;
using TextParts = std::vector<TextPart>;

struct ChatMlForm {
  std::string default_system;    ///< what stands before chats without a system message
  bool tools_are_users = false;  ///< answers of tools stand in the user's turn, as Qwen's
};
[[nodiscard]] TextParts chatml_prompt(Messages messages, const ChatMlForm& form);

[[nodiscard]] TextParts llama2_prompt(Messages messages);
[[nodiscard]] TextParts llama3_prompt(Messages messages);

/// As Llama 3, and each prompt begins with dates.
struct Llama31Form {
  std::string date;  ///< that is said to be today's; empty: the day's
};
/// \throws std::invalid_argument for an assistant that asks for several tools at once
[[nodiscard]] TextParts llama31_prompt(Messages messages, const Llama31Form& form);

struct GemmaForm {
  bool takes_system = false;  ///< as the beginning of the user's first turn
};
/// \throws std::invalid_argument where users do not speak by turns; for a system message that the
/// form does not take
[[nodiscard]] TextParts gemma_prompt(Messages messages, const GemmaForm& form);

struct MistralForm {
  std::string before_user, after_user, before_reply,
      after_reply;  ///< </s> stands before after_reply
  bool trims_reply = false;
  enum class System { none, first, last, last_user };
  System system = System::none;  ///< the message that it stands in: a user's
};
/// \throws std::invalid_argument as gemma_prompt(), and for tools
[[nodiscard]] TextParts mistral_prompt(Messages messages, const MistralForm& form);

struct Phi3Form {
  bool begins_with_bos = false;
  bool takes_system = true;
  bool skips_empty_system = false;
  bool reply_follows_user = false;  ///< a user's turn is at once the beginning of the assistant's
};
/// \throws std::invalid_argument for a system message that the form does not take, and for tools
[[nodiscard]] TextParts phi3_prompt(Messages messages, const Phi3Form& form);

}  // namespace serve
