// The bodies of /v1/completions, /v1/chat/completions, /v1/score and /tokenize.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../text/chat_template.hpp"
#include "../text/tokenizer.hpp"
#include "service.hpp"

namespace serve {

/// Texts that one request may ask for, of all its prompts.
inline constexpr std::size_t most_texts = 128;

/// What is served, and within which limits.
struct Served {
  std::string name;  ///< of the model
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat = nullptr;  ///< null: there is none,
  std::string no_chat;                 ///< for this reason
  std::size_t max_length = 0;          ///< tokens of a text, its prompt included
  int max_choices = 16;
  bool explains = false;       ///< why prompts were found in the cache, or not, to who asks
  std::string processor = {};  ///< that it runs on, for people; empty: not known
};

struct ApiRequest {
  std::vector<Job> jobs;  ///< at least one, of as many choices each
  bool stream = false;
  bool include_usage = false;  ///< in a stream
};

/// SGLang's: how likely each label is behind the query and an item.
struct ScoreRequest {
  std::vector<Job> items;      ///< of label_job()
  bool apply_softmax = false;  ///< over the labels
};

/// \throws ApiError that names the field
[[nodiscard]] ApiRequest read_completion(std::string_view body, const Served& served);
[[nodiscard]] ApiRequest read_chat(std::string_view body, const Served& served);
/// \param most_items  that one request may have
[[nodiscard]] ScoreRequest read_score(std::string_view body, const Served& served,
                                      std::size_t most_items);
/// Of a prompt, or of a chat as read_chat() has it.
[[nodiscard]] std::vector<int> read_tokens(std::string_view body, const Served& served);

}  // namespace serve
