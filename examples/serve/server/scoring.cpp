#include "scoring.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace serve {

namespace {

Job scoring_job(std::vector<int> prompt, std::string cache_salt) {
  Job job;
  job.prompt = std::move(prompt);
  job.cache_salt = std::move(cache_salt);
  return job;
}

ItemScore failed(Refused::Reason reason, const std::string& why) {
  ItemScore score;
  score.failure = Refused(reason, why);
  return score;
}

ItemScore score_of(const Piece& piece) {
  if (piece.finish == Finish::deadline)
    return failed(Refused::Reason::late, "it has not ended in time: try again later");
  if (piece.finish == Finish::cancelled)
    return failed(Refused::Reason::closing, "the server is shutting down");
  ItemScore score;
  score.labels = piece.labels;
  score.is_greedy = true;
  for (const std::vector<TokenLogprob>& token : piece.prompt_logprobs) {
    score.logprobs.push_back(token[0].logprob);
    score.is_greedy = score.is_greedy && token[0].token == token[1].token;
  }
  return score;
}

}  // namespace

double ItemScore::sum() const {
  return std::accumulate(logprobs.begin(), logprobs.end(), 0.0);
}

Job continuation_job(std::vector<int> prompt, std::size_t begin, std::string cache_salt) {
  Job job = scoring_job(std::move(prompt), std::move(cache_salt));
  job.logprobs = 1;  // the most likely one beside the token's own
  job.scored_from = begin;
  return job;
}

Job label_job(std::vector<int> prompt, std::vector<int> labels, std::string cache_salt) {
  Job job = scoring_job(std::move(prompt), std::move(cache_salt));
  job.labels = std::move(labels);
  return job;
}

bool Scoring::wait(std::chrono::milliseconds limit) {
  while (scores_.size() < tickets_.size()) {
    try {
      const std::vector<Piece> pieces = tickets_[scores_.size()].channel().take(limit);
      if (pieces.empty()) return false;
      scores_.push_back(score_of(pieces.front()));  // it generates nothing, and has one piece
    } catch (const Refused& refused) {
      scores_.push_back(failed(refused.reason(), refused.what()));
    }
  }
  return true;
}

std::size_t Scoring::cached() const {
  return std::accumulate(tickets_.begin(), tickets_.end(), std::size_t{0},
                         [](std::size_t sum, const Service::Ticket& ticket) {
                           return sum + ticket.channel().cached();
                         });
}

std::vector<ItemScore> score(Service& service, std::vector<Job> items) {
  Scoring scoring(service, std::move(items));
  while (!scoring.wait(std::chrono::seconds(1))) {
  }
  return scoring.scores();
}

}  // namespace serve
