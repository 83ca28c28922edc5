#include "parallel_engine.hpp"

#include <cstdint>
#include <utility>

#include "../ranks/agreement.hpp"
#include "../ranks/message.hpp"

namespace serve {

namespace {

enum class Command : std::uint8_t { submit, cancel, stop, step, end };

/// Calls f with each field of a request. A field that is added to Request must be added here: the
/// binding counts them.
template <class R, class F>
void for_fields(R& request, const F& f) {
  auto& [id, prompt, max_length, choices, sampling, logit_bias, stop_tokens, ignore_eos, min_tokens,
         logprobs, prompt_logprobs, scored_from, labels, explains, tenant, salt, deadline,
         start_by] = request;
  f(id), f(prompt), f(max_length), f(choices), f(sampling), f(logit_bias), f(stop_tokens);
  f(ignore_eos), f(min_tokens), f(logprobs);
  f(prompt_logprobs), f(scored_from), f(labels), f(explains), f(tenant), f(salt), f(deadline);
  f(start_by);
}

class Leader final : public Engine {
 public:
  Leader(Communicator& ranks, std::unique_ptr<Engine> engine)
      : ranks_(ranks), engine_(std::move(engine)) {}
  ~Leader() override {
    if (in_step_) return;  // it failed, and others may be anywhere in it
    put(Command::end);
    message_.broadcast(ranks_);
  }

  void submit(Request request) override {
    RankMessage submitted;
    submitted.put(Command::submit);
    for_fields(request, [&](const auto& field) { submitted.put(field); });
    engine_->submit(std::move(request));  // may refuse it
    message_.append(submitted);
  }
  void cancel(RequestId id) override {
    put(Command::cancel, id);
    engine_->cancel(id);
  }
  void stop(RequestId id, int choice) override {
    put(Command::stop, id, choice);
    engine_->stop(id, choice);
  }
  bool step(double now) override {
    put(Command::step, now);
    message_.broadcast(ranks_);
    message_ = {};
    in_step_ = true;
    const bool worked = engine_->step(now);
    in_step_ = false;
    return worked;
  }
  std::vector<Event> take_events() override { return engine_->take_events(); }
  [[nodiscard]] std::size_t waiting() const override { return engine_->waiting(); }
  [[nodiscard]] TreeSnapshot snapshot() const override { return engine_->snapshot(); }
  [[nodiscard]] const EngineStats& stats() const override { return engine_->stats(); }
  [[nodiscard]] std::size_t bytes_per_chunk() const override {
    return engine_->bytes_per_chunk() * static_cast<std::size_t>(ranks_.size());
  }
  [[nodiscard]] std::size_t bytes_per_window_chunk() const override {
    return engine_->bytes_per_window_chunk() * static_cast<std::size_t>(ranks_.size());
  }
  void set_cache_sink(CacheSink sink) override { engine_->set_cache_sink(std::move(sink)); }
  void set_tier_sink(TierSink sink) override { engine_->set_tier_sink(std::move(sink)); }
  [[nodiscard]] std::vector<CachedChunk> cached_chunks() const override {
    return engine_->cached_chunks();
  }

 private:
  template <class... Values>
  void put(const Values&... values) {
    (message_.put(values), ...);
  }

  Communicator& ranks_;
  std::unique_ptr<Engine> engine_;
  RankMessage message_;  // what others do not know yet
  bool in_step_ = false;
};

}  // namespace

void check_setup(Communicator& ranks, const Model& model, const EngineOptions& options) {
  const Config& c = model.config;
  check_agreement(ranks, "model",
                  Digest()
                      .add(c.dim)
                      .add(c.num_layers)
                      .add(c.num_qo_heads)
                      .add(c.num_kv_heads)
                      .add(c.vocab_size)
                      .add(model.final_norm));
  check_agreement(ranks, "options of the engine",
                  Digest()
                      .add(options.chunk_size)
                      .add(static_cast<int>(options.sharing))
                      .add(static_cast<int>(options.kv))
                      .add(options.max_chunks)
                      .add(options.keeps_windows)
                      .add(options.max_window_chunks)
                      .add(options.step_tokens)
                      .add(static_cast<int>(options.mode))
                      .add(static_cast<int>(options.preempt))
                      .add(static_cast<int>(options.order))
                      .add(options.swap_bytes)
                      .add(options.max_sequences)
                      .add(options.stop));
}

std::unique_ptr<Engine> lead(Communicator& ranks, std::unique_ptr<Engine> engine) {
  return std::make_unique<Leader>(ranks, std::move(engine));
}

void follow(Communicator& ranks, Engine& engine) {
  for (;;) {
    RankMessage message;
    message.broadcast(ranks);
    while (!message.empty()) {
      switch (message.take<Command>()) {
        case Command::submit: {
          Request request;
          for_fields(request, [&](auto& field) { message.take(field); });
          engine.submit(std::move(request));
          break;
        }
        case Command::cancel:
          engine.cancel(message.take<RequestId>());
          break;
        case Command::stop: {
          const auto id = message.take<RequestId>();
          engine.stop(id, message.take<int>());
          break;
        }
        case Command::step:
          engine.step(message.take<double>());
          (void)engine.take_events();  // rank 0 reports them
          break;
        case Command::end:
          return;
      }
    }
  }
}

}  // namespace serve
