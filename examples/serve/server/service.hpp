// Requests from many threads, one engine. The engine belongs to a thread of its own, which alone
// calls it; requests reach it through a bounded queue and get their events through channels.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../engine/engine.hpp"
#include "../text/tokenizer.hpp"
#include "channel.hpp"
#include "choice_text.hpp"
#include "histogram.hpp"
#include "tenants.hpp"

namespace serve {

/// What a client asks for of one prompt.
struct Job {
  std::vector<int> prompt;
  std::size_t max_tokens = 0;  ///< to generate, of each choice
  int choices = 1;
  Sampling sampling;
  std::vector<LogitBias> logit_bias;
  int logprobs = -1;              ///< as Request's
  std::vector<std::string> stop;  ///< strings that end a text; none is empty
  std::vector<int> stop_tokens;   ///< as Request's, and the following two
  bool ignore_eos = false;
  std::size_t min_tokens = 0;  ///< nor does a stop string end a text before
  std::string cache_salt;      ///< K/V is shared only among requests with the same
  bool echo = false;           ///< whether texts begin with the prompt, logprobs with its
  std::size_t scored_from =
      0;                    ///< as Request's: Piece::prompt_logprobs are wanted; 0: they are not
  std::vector<int> labels;  ///< as Request's
  bool explains = false;    ///< as Request's
};

struct ServiceOptions {
  std::size_t max_requests = 256;  ///< that wait or run; more are refused
  std::size_t max_salts = 10'000;  ///< that are remembered
  double request_seconds = 600;    ///< a request ends when so many have passed since it came
  double wait_seconds = 60;        ///< and is refused when it has not begun within so many
  std::function<void()> after_step = [] {};  ///< called by the engine's thread
};

/// Counts since the service was made.
struct ServiceCounters {
  std::size_t requests = 0;  ///< that wait or run now
  std::size_t waiting = 0;   ///< of them: the engine has not begun with them
  std::size_t salts = 0;     ///< that are remembered now
  std::uint64_t accepted = 0;
  std::uint64_t refused[6] = {};   ///< by Refused::Reason
  std::uint64_t finished[5] = {};  ///< choices by Finish; those that were late are refused
  std::uint64_t scored_items = 0;  ///< of submit_apart()
  std::uint64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
  Histogram first_token;  ///< from the request to the first token of any choice
  Histogram whole;        ///< from the request to the end of its last choice
  EngineStats engine;
};

class Service {
 public:
  /// A request that waits or runs. To drop it is to cancel it.
  class Ticket {
   public:
    Ticket(Service& service, RequestId id, std::shared_ptr<Channel> channel)
        : service_(&service), id_(id), channel_(std::move(channel)) {}
    Ticket(Ticket&& from) noexcept
        : service_(std::exchange(from.service_, nullptr)),
          id_(from.id_),
          channel_(std::move(from.channel_)) {}
    Ticket& operator=(Ticket&&) = delete;
    ~Ticket() {
      if (service_ != nullptr) service_->cancel(id_);
    }
    [[nodiscard]] Channel& channel() const { return *channel_; }

   private:
    Service* service_;
    RequestId id_;
    std::shared_ptr<Channel> channel_;
  };

  /// \param tokenizer  outlives the service
  Service(std::unique_ptr<Engine> engine, const Tokenizer& tokenizer, ServiceOptions options);
  /// Cancels what still runs. \pre no ticket is left
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  /// Hands prompts to the engine, all of them or none, as one request with one channel; choices
  /// are counted through. From any thread, as everything here. \throws Refused
  [[nodiscard]] std::vector<Ticket> submit(std::vector<Job> jobs);
  [[nodiscard]] Ticket submit(Job job);
  /// The same with a channel for each: what is refused, is refused alone, by its channel.
  [[nodiscard]] std::vector<Ticket> submit_apart(std::vector<Job> jobs);

  /// Refuses all requests from now on.
  void close();
  /// Waits until all requests have ended; false where that takes longer. \pre close() was called
  [[nodiscard]] bool wait_until_idle(std::chrono::duration<double> limit);
  /// The same, and cancels those that have not ended within the limit.
  void drain(std::chrono::duration<double> limit);
  /// Why the engine can do no more; empty while it can.
  [[nodiscard]] std::string failure() const;
  [[nodiscard]] bool closing() const;

  [[nodiscard]] ServiceCounters counters() const;
  /// The tree between two steps. Empty if the engine is broken.
  [[nodiscard]] TreeSnapshot snapshot();
  /// The tenant that this salt names now; 0: none.
  [[nodiscard]] std::uint64_t tenant_of(const std::string& salt);
  /// Engine::cached_chunks() between two steps. Empty if the engine is broken.
  [[nodiscard]] std::vector<CachedChunk> cached_chunks();

 private:
  /// What the engine's thread knows of a request.
  struct Live {
    std::shared_ptr<Channel> channel;
    std::vector<ChoiceText> texts;  ///< by choice
    std::size_t running = 0;        ///< choices that have not ended
    int first_choice = 0;           ///< of the channel's
    std::size_t prompt_tokens = 0;
    std::vector<int> echo;     ///< the prompt, if texts begin with it
    std::vector<char> echoed;  ///< by choice
    bool is_scored = false;    ///< log-probabilities are asked for
    std::vector<std::vector<TokenLogprob>> prompt_logprobs;
    double came = 0;
    bool has_output = false;  ///< an event of it has come
  };
  struct Command {
    std::function<void()> run;
    std::shared_ptr<Channel> channel;  ///< of a request that is to start: refused if that cannot be
  };

  [[nodiscard]] std::vector<Ticket> enqueue(std::vector<Job> jobs, bool apart);
  void cancel(RequestId id);
  /// What f(engine) returns between two steps; of a broken engine nothing.
  template <class F>
  [[nodiscard]] auto ask(const F& f);
  [[nodiscard]] double now() const;
  [[nodiscard]] Refused refusal(Refused::Reason reason);

  // On the engine's thread:
  void run();
  [[nodiscard]] bool run_commands(bool wait);
  void start(RequestId id, Job job, int first_choice, std::shared_ptr<Channel> channel,
             double came);
  [[nodiscard]] static std::string echo(Live& live, int choice);
  void deliver_all();
  void deliver(const Event& event);
  void refuse(std::map<RequestId, Live>::iterator live, Refused::Reason reason,
              const std::string& why);
  [[nodiscard]] bool step();
  void end(std::map<RequestId, Live>::iterator live);
  void cancel_all();
  void fail(const std::string& why);

  std::unique_ptr<Engine> engine_;
  const Tokenizer& tokenizer_;
  const ServiceOptions options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();

  // Of the engine's thread alone:
  std::map<RequestId, Live> live_;
  Tenants tenants_;
  std::deque<Command> taken_;  // from commands_, to be run now
  int failures_ = 0;           // of steps in a row

  mutable std::mutex mutex_;  // of all that follow
  std::condition_variable work_, idle_;
  std::deque<Command> commands_;
  std::set<RequestId> gone_;  // whose cancelling is among them
  ServiceCounters counters_;
  RequestId last_id_ = 0;
  bool closing_ = false, stopping_ = false;
  std::string failure_;

  std::thread thread_;  // the last: it sees all others made
};

}  // namespace serve
