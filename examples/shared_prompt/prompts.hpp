// Prompts of 32 users: a system prompt that all requests begin with, and for each request the
// user's turn and the reply that is "generated" (there is no model behind this example).
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace shared_prompt {

/// Instructions, tool specifications and worked examples of an assistant with plugins.
std::string_view system_prompt();

/// Text that several requests have in common after the system prompt, or none.
enum class Attachment { none, itinerary, minutes };
std::string_view attachment_text(Attachment attachment);

struct Request {
  std::string_view title;  ///< for the picture of the tree
  Attachment attachment;
  std::string_view user;
  std::string_view reply;
};

std::span<const Request> requests();

/// The whole prompt of a request: system prompt, attachment, the user's turn.
/// \param copy  0, or a number that makes the user's turn another one (more requests than texts)
std::string prompt_text(const Request& request, int copy);

}  // namespace shared_prompt
