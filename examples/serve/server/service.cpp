#include "service.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

namespace serve {

Service::Service(std::unique_ptr<Engine> engine, const Tokenizer& tokenizer, ServiceOptions options)
    : engine_(std::move(engine)),
      tokenizer_(tokenizer),
      options_(options),
      tenants_(options.max_salts),
      thread_([this] { run(); }) {}

Service::~Service() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = stopping_ = true;
    work_.notify_one();
  }
  thread_.join();
}

double Service::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

// --- from any thread
// ---------------------------------------------------------------------------------

std::vector<Service::Ticket> Service::submit(std::vector<Job> jobs) {
  std::vector<Ticket> tickets = enqueue(std::move(jobs), false);
  tickets.front().channel().wait_until_accepted(tickets.size());
  return tickets;
}

std::vector<Service::Ticket> Service::submit_apart(std::vector<Job> jobs) {
  return enqueue(std::move(jobs), true);
}

/// \param apart  whether each has a channel of its own
std::vector<Service::Ticket> Service::enqueue(std::vector<Job> jobs, bool apart) {
  auto channel = std::make_shared<Channel>();
  std::vector<Ticket> tickets;
  tickets.reserve(jobs.size());
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw refusal(Refused::Reason::failed);
  if (closing_) throw refusal(Refused::Reason::closing);
  if (jobs.size() > options_.max_requests)
    throw Refused(Refused::Reason::invalid,
                  fmt::format("{} = {} {}: expected at most {}, the places for requests",
                              apart ? "items" : "prompt", jobs.size(), apart ? "items" : "prompts",
                              options_.max_requests));
  if (counters_.requests + jobs.size() > options_.max_requests)
    throw refusal(Refused::Reason::full);
  counters_.requests += jobs.size();
  if (apart) counters_.scored_items += jobs.size();
  int first_choice = 0;
  for (Job& job : jobs) {
    if (apart) channel = std::make_shared<Channel>();
    const RequestId id = ++last_id_;
    const int choices = job.choices;
    commands_.push_back(
        {[this, id, job = std::move(job), first_choice, channel, came = now()]() mutable {
           start(id, std::move(job), first_choice, std::move(channel), came);
         },
         channel});
    first_choice += choices;  // of which channels of their own have one
    tickets.emplace_back(*this, id, channel);
  }
  work_.notify_one();
  return tickets;
}

Service::Ticket Service::submit(Job job) {
  std::vector<Job> one;
  one.push_back(std::move(job));
  return std::move(submit(std::move(one)).front());
}

/// \pre mutex_ is held
Refused Service::refusal(Refused::Reason reason) {
  ++counters_.refused[static_cast<std::size_t>(reason)];
  switch (reason) {
    case Refused::Reason::full:
      return {reason, fmt::format("all {} places for requests are taken: try again later",
                                  options_.max_requests)};
    case Refused::Reason::closing:
      return {reason, "the server is shutting down"};
    default:
      return {reason, "the engine has failed: " + failure_};
  }
}

void Service::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  commands_.push_back(
      {[this, id] { engine_->cancel(id); }, nullptr});  // of one that has ended: nothing
  gone_.insert(id);
  work_.notify_one();
}

void Service::close() {
  const std::lock_guard lock(mutex_);
  closing_ = true;
}

bool Service::wait_until_idle(std::chrono::duration<double> limit) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, limit, [this] { return counters_.requests == 0; });
}

void Service::drain(std::chrono::duration<double> limit) {
  if (wait_until_idle(limit)) return;
  std::unique_lock lock(mutex_);
  commands_.push_back({[this] { cancel_all(); }, nullptr});
  work_.notify_one();
  idle_.wait(lock, [this] { return counters_.requests == 0; });
}

std::string Service::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool Service::closing() const {
  const std::lock_guard lock(mutex_);
  return closing_;
}

ServiceCounters Service::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

template <class F>
auto Service::ask(const F& f) {
  using Result = decltype(f(std::as_const(*engine_)));
  auto promise = std::make_shared<std::promise<Result>>();
  std::future<Result> future = promise->get_future();
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return Result{};
    commands_.push_back(
        {[this, f, promise] { promise->set_value(f(std::as_const(*engine_))); }, nullptr});
    work_.notify_one();
  }
  try {
    return future.get();
  } catch (const std::future_error&) {  // the engine failed before it came to that
    return Result{};
  }
}

TreeSnapshot Service::snapshot() {
  return ask([](const Engine& engine) {
    TreeSnapshot tree = engine.snapshot();
    tree.chunk_bytes = engine.bytes_per_chunk();
    tree.windows.chunk_bytes = engine.bytes_per_window_chunk();
    return tree;
  });
}

std::uint64_t Service::tenant_of(const std::string& salt) {
  return ask([this, salt](const Engine&) { return tenants_.find(salt); });
}

std::vector<CachedChunk> Service::cached_chunks() {
  return ask([](const Engine& engine) { return engine.cached_chunks(); });
}

// --- the engine's thread
// -----------------------------------------------------------------------------

void Service::run() {
  engine_->set_gone([this](RequestId id) {
    const std::lock_guard lock(mutex_);
    return gone_.contains(id);
  });
  try {
    bool busy = false;
    while (run_commands(!busy)) {
      busy = step();
      deliver_all();
      options_.after_step();
    }
    cancel_all();
    deliver_all();
    options_.after_step();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

/// A step, or the end of those without whom the next one may succeed. False where there was nothing
/// to do. \throws what the engine does where it cannot go on
bool Service::step() {
  constexpr int most_failures = 3;
  try {
    const bool busy = engine_->step(now());
    failures_ = 0;
    return busy;
  } catch (const std::exception& error) {
    const std::vector<RequestId> failed = engine_->failed();
    if (failed.empty() || ++failures_ == most_failures) throw;
    for (const RequestId id : failed) {
      const auto live = live_.find(id);
      if (live == live_.end()) continue;
      refuse(live, Refused::Reason::error,
             fmt::format("it has failed in the engine: {}", error.what()));
      engine_->cancel(id);
    }
    return true;
  }
}

/// Does what was asked for since the last step, or waits for it. False when the service ends.
bool Service::run_commands(bool wait) {
  {
    std::unique_lock lock(mutex_);
    counters_.engine = engine_->stats();
    counters_.waiting = engine_->waiting();
    counters_.salts = tenants_.size();
    if (wait) work_.wait(lock, [this] { return stopping_ || !commands_.empty(); });
    if (stopping_ && commands_.empty()) return false;
    taken_.swap(commands_);
    gone_.clear();
  }
  for (; !taken_.empty(); taken_.pop_front()) taken_.front().run();
  return true;
}

void Service::cancel_all() {
  for (const auto& [id, live] : live_) engine_->cancel(id);
}

void Service::start(RequestId id, Job job, int first_choice, std::shared_ptr<Channel> channel,
                    double came) {
  Live live;
  live.channel = channel;
  live.first_choice = first_choice;
  if (job.echo) live.echo = job.prompt;
  live.is_scored = job.logprobs >= 0;
  live.echoed.resize(static_cast<std::size_t>(job.choices));
  live.prompt_tokens = job.prompt.size();
  live.came = came;
  live.running = static_cast<std::size_t>(job.choices);
  for (int i = 0; i < job.choices; ++i)
    live.texts.emplace_back(tokenizer_, job.echo || job.prompt.empty() ? -1 : job.prompt.back(),
                            job.stop, job.min_tokens);
  Request request;
  request.id = id;
  request.max_length = job.prompt.size() + job.max_tokens;
  request.prompt = std::move(job.prompt);
  request.choices = job.choices;
  request.sampling = job.sampling;
  request.logit_bias = std::move(job.logit_bias);
  request.stop_tokens = std::move(job.stop_tokens);
  request.ignore_eos = job.ignore_eos;
  request.min_tokens = job.min_tokens;
  request.logprobs = job.logprobs;
  request.prompt_logprobs = job.logprobs >= 0 && (job.echo || job.scored_from > 0);
  request.scored_from = std::max(job.scored_from, std::size_t{1});
  request.labels = std::move(job.labels);
  request.tenant = tenants_.number_of(job.cache_salt);
  request.salt = job.cache_salt;
  request.explains = job.explains;
  request.deadline = came + options_.request_seconds;
  request.start_by = came + options_.wait_seconds;
  const auto entry = live_.emplace(id, std::move(live)).first;
  try {
    engine_->submit(std::move(request));
  } catch (const std::invalid_argument& error) {
    return refuse(entry, Refused::Reason::invalid, error.what());
  } catch (const std::exception& error) {
    refuse(entry, Refused::Reason::error,
           fmt::format("it has failed in the engine: {}", error.what()));
    return engine_->cancel(id);
  }
  {
    const std::lock_guard lock(mutex_);
    ++counters_.accepted;
  }
  channel->accept();
}

/// Events may ask the engine to end a choice, of which there are events again.
void Service::deliver_all() {
  for (auto events = engine_->take_events(); !events.empty(); events = engine_->take_events())
    for (const Event& event : events) deliver(event);
}

void Service::deliver(const Event& event) {
  const auto found = live_.find(event.id);
  if (found == live_.end()) return;
  if (event.finish == Finish::late)
    return refuse(found, Refused::Reason::late,
                  fmt::format("there was no room for it within {} s: try again later",
                              options_.wait_seconds));
  Live& live = found->second;
  ChoiceText& text = live.texts[static_cast<std::size_t>(event.choice)];
  Piece piece;
  piece.choice = live.first_choice + event.choice;
  piece.finish = event.finish;
  piece.labels = event.labels;
  piece.report = event.report;
  if (live.echo.empty())
    piece.prompt_logprobs = event.prompt_logprobs;
  else if (!event.prompt_logprobs.empty())
    live.prompt_logprobs = event.prompt_logprobs;
  piece.text = echo(live, event.choice);
  const bool stopped_before = text.stopped();
  if (event.token >= 0 && !stopped_before) {
    piece.text += text.push(event.token, event.logprobs);
    piece.tokens = 1;
  } else if (!event.logprobs.empty() && !stopped_before) {
    text.end_with(event.logprobs);
  }
  if (event.finish != Finish::none && !text.stopped()) piece.text += text.finish();
  piece.scored = text.take_scored();
  if (text.stopped()) {  // also by what was held back, or by the last token
    if (event.finish == Finish::length) piece.finish = Finish::stop;
    if (event.finish == Finish::none && !stopped_before) engine_->stop(event.id, event.choice);
    piece.stop_string = text.stop_string();
  } else {
    piece.stop_token = event.stop_token;
  }
  const bool first = !std::exchange(live.has_output, true);
  {
    const std::lock_guard lock(mutex_);
    counters_.generated_tokens += piece.tokens;
    if (first) {
      counters_.first_token.add(now() - live.came);
      counters_.prompt_tokens += live.prompt_tokens;
      counters_.cached_tokens += event.cached;
    }
    if (event.finish != Finish::none) ++counters_.finished[static_cast<std::size_t>(piece.finish)];
  }
  const bool last = event.finish != Finish::none && --live.running == 0;
  const auto channel = live.channel;
  if (last) end(found);  // before the client gets it: its slot in the queue is free by then
  channel->push(std::move(piece), first ? event.cached : 0);
}

/// The prompt, before all else that a choice says, if that is asked for. Its tokens have their
/// log-probabilities where these are known: a request may end before they are.
std::string Service::echo(Live& live, int choice) {
  if (std::exchange(live.echoed[static_cast<std::size_t>(choice)], 1) != 0) return "";
  ChoiceText& text = live.texts[static_cast<std::size_t>(choice)];
  std::string said;
  const bool is_scored = live.is_scored && live.prompt_logprobs.size() + 1 == live.echo.size();
  for (std::size_t i = 0; i < live.echo.size(); ++i) {
    std::vector<TokenLogprob> logprobs;
    if (is_scored)
      logprobs = i == 0 ? std::vector{TokenLogprob{live.echo[0], 0}} : live.prompt_logprobs[i - 1];
    said += text.echo(live.echo[i], std::move(logprobs));
  }
  return said;
}

/// All choices at once: their other events are dropped.
void Service::refuse(std::map<RequestId, Live>::iterator live, Refused::Reason reason,
                     const std::string& why) {
  const auto channel = live->second.channel;
  {
    const std::lock_guard lock(mutex_);
    ++counters_.refused[static_cast<std::size_t>(reason)];
    --counters_.requests;
    live_.erase(live);
    idle_.notify_all();
  }
  channel->refuse(reason, why);
}

void Service::end(std::map<RequestId, Live>::iterator live) {
  const std::lock_guard lock(mutex_);
  counters_.whole.add(now() - live->second.came);
  --counters_.requests;
  live_.erase(live);
  idle_.notify_all();
}

/// The engine cannot continue: all requests are refused.
void Service::fail(const std::string& why) {
  const std::string message = "the engine has failed: " + why;
  {
    const std::lock_guard lock(mutex_);
    failure_ = why.empty() ? "for no known reason" : why;
    counters_.requests = 0;
    for (Command& command : commands_) taken_.push_back(std::move(command));
    commands_.clear();
    idle_.notify_all();
  }
  for (const Command& command : taken_)
    if (command.channel) command.channel->refuse(Refused::Reason::failed, message);
  taken_.clear();
  for (const auto& [id, live] : live_) live.channel->refuse(Refused::Reason::failed, message);
  live_.clear();
}

}  // namespace serve
