// An engine without a model: what it says is the prompt again and again, so that tests know it. It
// can be held, and it can break.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.hpp"

namespace test {

class ScriptedEngine final : public serve::Engine {
 public:
  /// What tests turn, from their threads.
  struct Levers {
    std::atomic<bool> held = false;          ///< no step makes progress
    std::atomic<bool> slow = false;          ///< a step takes a hundredth of a second
    std::atomic<bool> full = false;          ///< no request that comes fits
    std::atomic<bool> breaks = false;        ///< the next step fails
    std::atomic<int> fails = 0;              ///< so many more do, about the last request
    std::atomic<std::size_t> submitted = 0;  ///< requests so far
    std::atomic<std::uint64_t> tenant = 0;   ///< of the last of them

    [[nodiscard]] serve::Request last_request() {
      const std::lock_guard lock(mutex);
      return last;
    }
    std::mutex mutex;  // of the last request
    serve::Request last;
  };

  /// \param first  prompt tokens that are not repeated: bos
  explicit ScriptedEngine(Levers& levers, std::size_t first = 0) : levers_(levers), first_(first) {}

  void submit(serve::Request request) override {
    if (request.prompt.size() == 199) throw std::bad_alloc();
    if (request.prompt.size() > 200)
      throw std::invalid_argument("prompt = " + std::to_string(request.prompt.size()) +
                                  " tokens: expected at most 200");
    levers_.tenant = request.tenant;
    {
      const std::lock_guard lock(levers_.mutex);
      levers_.last = request;
    }
    ++levers_.submitted;
    Live live;
    live.choices.resize(static_cast<std::size_t>(request.choices));
    live.request = std::move(request);
    const serve::RequestId id = live.request.id;
    live_.emplace(id, std::move(live));
  }

  void cancel(serve::RequestId id) override {
    const auto found = live_.find(id);
    if (found == live_.end()) return;
    for (std::size_t c = 0; c < found->second.choices.size(); ++c)
      end(found->second, c, -1, serve::Finish::cancelled);
    live_.erase(found);
  }

  void stop(serve::RequestId id, int choice) override {
    const auto found = live_.find(id);
    if (found == live_.end()) return;
    end(found->second, static_cast<std::size_t>(choice), -1, serve::Finish::stop);
  }

  bool step(double now) override {
    if (levers_.breaks) throw std::runtime_error("it was made to break");
    std::erase_if(live_, [](const auto& entry) { return entry.second.has_ended(); });
    failed_.clear();
    if (levers_.fails > 0 && !live_.empty()) {
      --levers_.fails;
      failed_.assign(1, live_.rbegin()->first);
      throw std::runtime_error("it does not like this one");
    }
    if (live_.empty()) return false;
    ++stats_.steps;
    for (auto& [id, live] : live_) {
      live.waits = live.waits && levers_.full;
      if (live.waits && now > live.request.start_by)
        for (std::size_t c = 0; c < live.choices.size(); ++c) end(live, c, -1, serve::Finish::late);
    }
    if (levers_.held || waiting() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (levers_.held) return true;
    if (levers_.slow) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    for (auto& [id, live] : live_)
      for (std::size_t c = 0; c < live.choices.size() && !live.waits; ++c) advance(live, c, now);
    return true;
  }

  [[nodiscard]] std::vector<serve::RequestId> failed() const override { return failed_; }
  std::vector<serve::Event> take_events() override { return std::exchange(events_, {}); }
  [[nodiscard]] std::size_t waiting() const override {
    return static_cast<std::size_t>(
        std::count_if(live_.begin(), live_.end(), [](const auto& e) { return e.second.waits; }));
  }
  [[nodiscard]] const serve::EngineStats& stats() const override { return stats_; }
  [[nodiscard]] std::size_t bytes_per_chunk() const override { return 1; }
  /// A chunk and a node for each choice that runs.
  [[nodiscard]] serve::TreeSnapshot snapshot() const override {
    serve::TreeSnapshot tree;
    tree.chunk_size = 8;
    for (const auto& [id, live] : live_)
      for (const Choice& choice : live.choices)
        if (!live.waits && !choice.ended) {
          ++tree.chunks_used;
          serve::TreeSnapshot::Node node;
          node.id = static_cast<int>(tree.chunks_used);
          node.tokens = live.request.prompt.size() + choice.said;
          node.sequences = 1;
          node.first_tokens.assign(live.request.prompt.begin(), live.request.prompt.begin() + 1);
          tree.nodes.push_back(node);
        }
    return tree;
  }

 private:
  struct Choice {
    std::size_t said = 0;
    bool ended = false;
  };
  struct Live {
    serve::Request request;
    std::vector<Choice> choices;
    bool waits = true, scored = false;
    [[nodiscard]] bool has_ended() const {
      for (const Choice& choice : choices)
        if (!choice.ended) return false;
      return true;
    }
  };

  void advance(Live& live, std::size_t c, double now) {
    Choice& choice = live.choices[c];
    if (choice.ended) return;
    const serve::Request& request = live.request;
    if (now >= request.deadline) return end(live, c, -1, serve::Finish::deadline);
    if (request.prompt.size() >= request.max_length) return end(live, c, -1, serve::Finish::length);
    const std::size_t period = request.prompt.size() - first_;
    const int token =
        period == 0 ? request.prompt.back() : request.prompt[first_ + choice.said % period];
    const auto& stop = request.stop_tokens;
    if (choice.said >= request.min_tokens &&
        std::find(stop.begin(), stop.end(), token) != stop.end())
      return end(live, c, -1, serve::Finish::stop, token);
    ++choice.said;
    if (request.prompt.size() + choice.said >= request.max_length)
      end(live, c, token, serve::Finish::length);
    else
      emit(live, c, token, serve::Finish::none);
  }
  void end(Live& live, std::size_t c, int token, serve::Finish finish, int stop_token = -1) {
    if (std::exchange(live.choices[c].ended, true)) return;
    emit(live, c, token, finish, stop_token);
  }
  void emit(Live& live, std::size_t c, int token, serve::Finish finish, int stop_token = -1) {
    serve::Event event{live.request.id, static_cast<int>(c), token, finish, 1};
    event.stop_token = stop_token;
    if (live.request.logprobs >= 0 && token >= 0) {  // -0.5; of others, down from the token, less
      event.logprobs.push_back({token, -0.5f});
      for (int i = 0; i < live.request.logprobs; ++i)
        event.logprobs.push_back({token - i, -0.5f - static_cast<float>(i)});
    }
    if (!live.scored)
      for (const int label : live.request.labels)
        event.labels.push_back(-static_cast<float>(label));
    if (!std::exchange(live.scored, true) && live.request.prompt_logprobs)  // less and less likely
      for (std::size_t i = 1; i < live.request.prompt.size(); ++i)
        event.prompt_logprobs.push_back(
            {{live.request.prompt[i], -static_cast<float>(i)}, {live.request.prompt[0], -0.125f}});
    events_.push_back(std::move(event));
  }

  Levers& levers_;
  std::size_t first_;
  std::map<serve::RequestId, Live> live_;
  std::vector<serve::Event> events_;
  std::vector<serve::RequestId> failed_;
  serve::EngineStats stats_;
};

/// Waits for what must become true, however slow the machine is; a test that waits in vain fails.
template <class Condition>
bool eventually(Condition condition) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    if (std::chrono::steady_clock::now() - start > std::chrono::minutes(2)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace test
