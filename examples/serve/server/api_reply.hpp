// The replies of /v1/completions, /v1/chat/completions, /v1/score and /tokenize.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "../text/tokenizer.hpp"
#include "channel.hpp"
#include "scoring.hpp"

namespace serve {

/// What all parts of one reply repeat.
struct ReplyHead {
  bool chat = false;
  bool usage_follows = false;  ///< in a stream, after all else
  bool hides_cached = false;   ///< usage does not say what was cached
  bool tells_texts = false;    ///< where a cached text parts from a prompt, its token is named
  std::string id, model;
  long long created = 0;  ///< seconds since 1970
};

struct Usage {
  std::size_t prompt = 0, cached = 0, generated = 0;  ///< tokens; cached ones of the prompt
  /// What became of each prompt's tokens in the cache: of all of them, where that was asked for.
  std::vector<std::shared_ptr<const CacheReport>> reports = {};
};

/// A choice of a reply that comes as a whole.
struct WholeChoice {
  std::string text;
  Finish finish = Finish::none;
  std::string stop_string = {};  ///< as Piece's
  int stop_token = -1;
  std::vector<ScoredToken> scored = {};
};

/// \param max_length  tokens that a text may have
[[nodiscard]] std::string tokens_json(const std::vector<int>& tokens, std::size_t max_length);

/// Of each item the probabilities of its labels. \param softmax  over these alone
[[nodiscard]] std::string scores_json(const ReplyHead& head, const std::vector<ItemScore>& scores,
                                      bool softmax, const Usage& usage);

/// \param tokenizer  for the names of tokens beside log-probabilities
[[nodiscard]] std::string whole_reply(const ReplyHead& head, const Tokenizer& tokenizer,
                                      const std::vector<WholeChoice>& choices, const Usage& usage);

// Lines of a stream of server-sent events, each with the empty line after it:

/// What opens a choice of a chat; nothing for a completion.
[[nodiscard]] std::string opening_event(const ReplyHead& head, int choice);
[[nodiscard]] std::string piece_event(const ReplyHead& head, const Tokenizer& tokenizer,
                                      const Piece& piece);
[[nodiscard]] std::string usage_event(const ReplyHead& head, const Usage& usage);
[[nodiscard]] std::string event(const std::string& data);
/// The last of all.
inline constexpr const char* done_event = "data: [DONE]\n\n";

}  // namespace serve
