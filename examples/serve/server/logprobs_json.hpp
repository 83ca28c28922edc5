// Log-probabilities in OpenAI's two forms.
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "../text/tokenizer.hpp"
#include "channel.hpp"

namespace serve {

/// What "logprobs" of a choice is; null of no tokens.
/// \param chat  /v1/chat/completions', with the bytes of each token; else /v1/completions', where a
///              token that is no whole character is named "bytes:\xe2\x82"
[[nodiscard]] nlohmann::json logprobs_json(bool chat, const Tokenizer& tokenizer,
                                           std::span<const ScoredToken> scored);

}  // namespace serve
