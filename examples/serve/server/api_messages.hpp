// The messages of /v1/chat/completions: what clients write, and what they keep of replies.
#pragma once

#include <vector>

#include "../text/chat_template.hpp"
#include "json_fields.hpp"

namespace serve {

/// "messages" of a chat. Whatever history a client of OpenAI's builds is taken; serve.md says
/// what becomes of each field. \throws ApiError that names the field
[[nodiscard]] std::vector<Message> read_messages(const Fields& fields);

}  // namespace serve
