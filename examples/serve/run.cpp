// serve run: a model for any client of OpenAI's API, until SIGINT or SIGTERM.
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../support/options.hpp"
#include "../support/table.hpp"
#include "commands.hpp"
#include "loaded_model.hpp"
#include "server/http_server.hpp"
#include "server/kv_publisher.hpp"

namespace serve {

namespace {

struct Arguments {
  ModelArguments model;
  HttpOptions http;
  ServiceOptions service;
  std::string name, preempt = "swap", order = "fcfs", windows = "give-back";
  std::string tier_dir, tier_stored = "as-it-is";
  int tier_memory_mib = 0, tier_dir_mib = 10240;
  int chunk_size = 64, chunks = 0, window_chunks = 0, kv_mib = 512, swap_mib = 512;
  int step_tokens = 512;
  int explained_tokens = 1 << 18;
  int max_requests = 256, max_choices = 16, max_connections = 256, max_body_kib = 4096;
  int drain_seconds = 30;
  std::string kv_events, kv_topic = "kv-events", kv_form = "arrays";
  int kv_batches = 10000;
  bool kv_salted = false, quiet = false;
};

Arguments read_arguments(int argc, char** argv, bool& help) {
  Arguments a;
  examples::Options options("serve run", "serves a model over HTTP, as OpenAI's API has it");
  a.model.add_to(options);
  options.text("--host", "ADDRESS", "to listen at; any but 127.0.0.1 opens it to others",
               a.http.host);
  options.number("--port", "N", "0: any that is free", a.http.port, 0, 65535);
  options.text("--api-key", "KEY", "asked of all clients; or in CHUNKATTN_API_KEY", a.http.api_key);
  options.texts("--origin", "URL",
                "whose pages may ask, too, as https://chat.example; again for more",
                a.http.origins);
  options.text("--name", "NAME", "of the model; else the file's", a.name);
  options.number("--kv-mib", "N", "MiB of K/V", a.kv_mib, 1, 1 << 30);
  options.number("--chunks", "N", "chunks of K/V; 0: as --kv-mib says", a.chunks, 0, 1 << 30);
  options.choice("--windows", {"give-back", "keep"},
                 "K/V behind the windows of a model's layers: is free again, or stays as all other",
                 a.windows);
  options.number("--window-chunks", "N",
                 "chunks of K/V of layers with a window; 0: for a quarter of all tokens",
                 a.window_chunks, 0, 1 << 30);
  options.number("--chunk-size", "N", "tokens of a chunk: 8, 16, 32 or 64", a.chunk_size, 8, 64);
  options.choice("--preempt", {"swap", "recompute"}, "what happens to K/V of a preempted request",
                 a.preempt);
  options.choice("--order", {"fcfs", "cache"},
                 "who joins next: the first that came, or who shares most with those that run",
                 a.order);
  options.number("--swap-mib", "N", "MiB of host memory to swap to", a.swap_mib, 0, 1 << 30);
  options.number("--tier-memory", "N", "MiB of host memory for K/V that is evicted",
                 a.tier_memory_mib, 0, 1 << 30);
  options.text("--tier-dir", "PATH", "a directory for K/V, which outlives the server", a.tier_dir);
  options.number("--tier-dir-mib", "N", "MiB of all files there", a.tier_dir_mib, 1, 1 << 30);
  options.choice("--tier-stored", {"as-it-is", "int8", "e4m3"}, "what K/V is rounded to there",
                 a.tier_stored);
  options.number("--step-tokens", "N", "most tokens of prompts in a step, which takes about 0.1 s",
                 a.step_tokens, 1, 1 << 20);
  options.number("--max-requests", "N", "that wait or run; others get a 503 with Retry-After",
                 a.max_requests, 1, 1 << 20);
  options.number("--max-choices", "N", "the most that n may be", a.max_choices, 1, 128);
  options.number("--max-connections", "N", "at once", a.max_connections, 1, 400);
  options.number("--max-body-kib", "N", "KiB of a request", a.max_body_kib, 1, 1 << 20);
  options.number("--timeout", "SECONDS", "the longest that a request may take",
                 a.service.request_seconds, 0.0, 1e9);
  options.number("--max-wait", "SECONDS",
                 "for memory, before a request gets a 503 with Retry-After", a.service.wait_seconds,
                 0.0, 1e9);
  options.number("--drain", "SECONDS", "that requests have to end at SIGTERM; a second ends them",
                 a.drain_seconds, 0, 1 << 20);
  options.text("--kv-events", "ADDRESS",
               "publishes there what is cached, as vLLM does: a port of 127.0.0.1, HOST:PORT or "
               "ipc://FILE",
               a.kv_events);
  options.text("--kv-topic", "TEXT", "of these messages", a.kv_topic);
  options.choice("--kv-form", {"arrays", "maps"}, "of their events: vLLM writes maps from 0.32 on",
                 a.kv_form);
  options.number("--kv-batches", "N", "of them that are kept to be sent again", a.kv_batches, 1,
                 1 << 24);
  options.flag("--kv-salted", "publishes the tokens of tenants with a salt, too", a.kv_salted);
  options.flag("--tree-texts", "/ and /tree show how all texts begin to who has the key",
               a.http.tree_texts);
  options.number("--explain", "N",
                 "evicted tokens that are remembered, for explain_cache; 0: it is refused",
                 a.explained_tokens, 0, 1 << 30);
  options.flag("--hide-cached", "replies leave out how much of their prompts was cached",
               a.http.hides_cached);
  options.flag("--quiet", "no line for each request", a.quiet);
  help = !options.parse(argc, argv);
  if (const char* key = std::getenv("CHUNKATTN_API_KEY"); key != nullptr && a.http.api_key.empty())
    a.http.api_key = key;
  if (a.chunk_size != 8 && a.chunk_size != 16 && a.chunk_size != 32 && a.chunk_size != 64)
    throw examples::UsageError(
        fmt::format("--chunk-size = {}: expected 8, 16, 32 or 64", a.chunk_size));
  a.service.max_requests = a.http.max_requests = static_cast<std::size_t>(a.max_requests);
  a.http.shows_chunks = !a.kv_events.empty();
  a.http.shows_salted = a.kv_salted;
  a.http.max_connections = static_cast<std::size_t>(a.max_connections);
  a.http.max_body = static_cast<std::size_t>(a.max_body_kib) << 10;
  if (!a.quiet)
    a.http.log = [](const std::string& line) {
      fmt::print("         {}\n", line);
      std::fflush(stdout);
    };
  return a;
}

std::string model_name(const Arguments& arguments) {
  if (!arguments.name.empty()) return arguments.name;
  if (arguments.model.model.empty()) return "random";
  std::string name = std::filesystem::path(arguments.model.model).stem().string();
  // SmolLM2-135M-Instruct.Q4_1: how the file keeps it is not its name.
  if (const std::size_t dot = name.rfind(".Q"); dot != std::string::npos) name.resize(dot);
  return name;
}

/// Chunks of K/V, as --kv-mib says where their numbers are not given.
void set_chunks(const Arguments& arguments, const Config& config, EngineOptions& options) {
  const std::size_t bytes = to_size(2 * config.kv_dim()) * to_size(arguments.chunk_size) *
                            (options.kv == KvType::fp32 ? 4 : 2);
  const std::size_t all = (static_cast<std::size_t>(arguments.kv_mib) << 20) / bytes;  // of a layer
  const std::size_t layers = to_size(config.num_layers);
  options.max_chunks = to_size(arguments.chunks);
  if (!has_window_chunks(config, options)) {
    if (arguments.chunks == 0) options.max_chunks = std::max<std::size_t>(all / layers, 2);
    return;
  }
  options.max_window_chunks = to_size(arguments.window_chunks);
  const WindowRoom room = window_room(config, options, all);
  if (arguments.chunks == 0) options.max_chunks = room.chunks;
  if (arguments.window_chunks == 0) options.max_window_chunks = room.window_chunks;
}

/// What K/V is computed with: the model's file, by its length and a part of each 64 KiB, and how it
/// is used.
std::string model_text(const ModelArguments& arguments, const Model& model) {
  std::uint64_t hash = 0xcbf29ce484222325u, length = 0;
  if (!arguments.model.empty()) {
    std::ifstream file(arguments.model, std::ios::binary);
    std::vector<char> part(4096);
    length = std::filesystem::file_size(arguments.model);
    for (std::uint64_t at = 0; at < length; at += 1 << 16) {
      file.seekg(static_cast<std::streamoff>(at));
      file.read(part.data(), static_cast<std::streamsize>(part.size()));
      for (std::streamsize i = 0; i < file.gcount(); ++i)
        hash =
            (hash ^ static_cast<unsigned char>(part[static_cast<std::size_t>(i)])) * 0x100000001b3u;
      file.clear();
    }
  }
  return fmt::format("{} {:x} {} {} {} {}", length, hash, arguments.random, arguments.weights,
                     static_cast<int>(product_kind(arguments)), describe(model));
}

TierOptions tier_options(const Arguments& arguments, const Model& model) {
  TierOptions tiers;
  tiers.memory_bytes = static_cast<std::size_t>(arguments.tier_memory_mib) << 20;
  tiers.directory = arguments.tier_dir;
  tiers.directory_bytes = static_cast<std::uint64_t>(arguments.tier_dir_mib) << 20;
  if (arguments.tier_stored == "int8") tiers.stored = TierOptions::Stored::int8;
  if (arguments.tier_stored == "e4m3") tiers.stored = TierOptions::Stored::e4m3;
  if (tiers.memory_bytes > 0 || !tiers.directory.empty())
    tiers.model = model_text(arguments.model, model);
  tiers.published = !arguments.kv_events.empty();
  return tiers;
}

EngineOptions engine_options(const Arguments& arguments, const LoadedModel& loaded) {
  EngineOptions options;
  options.chunk_size = arguments.chunk_size;
  options.reduce = reduce_of(arguments.model);
  options.kv = kv_type(arguments.model, loaded.model);
  options.step_tokens = static_cast<std::size_t>(arguments.step_tokens);
  options.step_seconds = 0.1;
  options.stop = loaded.tokenizer->stop_tokens();
  options.order = arguments.order == "cache" ? Order::cache : Order::fcfs;
  options.preempt = arguments.preempt == "swap" ? Preempt::swap : Preempt::recompute;
  options.swap_bytes = static_cast<std::size_t>(arguments.swap_mib) << 20;
  options.tiers = tier_options(arguments, loaded.model);
  options.keeps_windows = arguments.windows == "keep";
  options.explained_tokens = to_size(arguments.explained_tokens);
  set_chunks(arguments, loaded.model.config, options);
  return options;
}

/// Before anybody is served: by an engine of its own, of which nothing stays in the cache.
/// \throws what that throws
void compute_a_token(const Model& model, Products& products, EngineOptions options) {
  options.max_chunks = 2;
  options.tiers = {};
  const auto engine = make_engine(model, products, options);
  engine->submit({.id = 1, .prompt = {0}, .max_length = 2});
  while (engine->step(0)) continue;
}

/// Publishes what the engine caches, if that is asked for.
std::unique_ptr<KvPublisher> publisher_of(const Arguments& arguments, Engine& engine) {
  if (arguments.kv_events.empty()) return nullptr;
  PublisherOptions options = publisher_addresses(arguments.kv_events);
  options.topic = arguments.kv_topic;
  options.form = arguments.kv_form == "maps" ? EventForm::maps : EventForm::arrays;
  options.tokens_per_block = static_cast<std::size_t>(arguments.chunk_size);
  options.window = engine.snapshot().windows.keys;
  options.with_tenants = arguments.kv_salted;
  options.num_batches = static_cast<std::size_t>(arguments.kv_batches);
  fmt::print("{}   {}, again at {}\n", examples::bold("events"), options.address, options.replay);
  auto publisher = std::make_unique<KvPublisher>(std::move(options));
  engine.set_cache_sink(
      [to = publisher.get()](const chunkattn::CacheEvent& event, std::span<const int> tokens) {
        to->add(event, tokens);
      });
  engine.set_tier_sink([to = publisher.get()](const TierEvent& event, std::span<const int> tokens) {
    to->add(event, tokens);
  });
  return publisher;
}

/// SIGINT and SIGTERM are waited for, not interrupted by: made before all threads, which inherit
/// it.
sigset_t block_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

/// Waits for a signal, or until the engine fails.
void wait_for_the_end(const sigset_t& signals, const Service& service) {
  const timespec half_a_second{0, 500'000'000};
  while (sigtimedwait(&signals, nullptr, &half_a_second) < 0 && service.failure().empty()) continue;
}

/// Lets requests end for a time, or until there is another signal; a third ends the program.
void drain(const sigset_t& signals, Service& service, std::chrono::seconds limit) {
  const timespec at_once{0, 0};
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end &&
         !service.wait_until_idle(std::chrono::milliseconds(100))) {
    if (sigtimedwait(&signals, nullptr, &at_once) < 0) continue;
    fmt::print("{}     at once: those that run are cancelled\n", examples::bold("ends"));
    std::fflush(stdout);
    break;
  }
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  service.drain(std::chrono::seconds(0));
}

void print_how_to_talk(const Served& served, const std::string& address, bool key) {
  const std::string header = key ? " -H \"Authorization: Bearer $CHUNKATTN_API_KEY\"" : "";
  const char* path = served.chat != nullptr ? "/v1/chat/completions" : "/v1/completions";
  const char* body = served.chat != nullptr
                         ? R"({"messages": [{"role": "user", "content": "Why is the sky blue?"}], )"
                           R"("temperature": 0, "stream": true})"
                         : R"({"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0, )"
                           R"("stream": true})";
  fmt::print("{}  {} at {}\n", examples::bold("serving"), served.name, address);
  fmt::print("         / is a page to look at, /v1 is OpenAI's API, /metrics are for Prometheus\n");
  fmt::print("{}      curl -N {}{}{} -H 'Content-Type: application/json' -d '{}'\n",
             examples::bold("try"), address, path, header, body);
  fmt::print("{}     SIGINT (Ctrl-C) or SIGTERM\n", examples::bold("stop"));
  std::fflush(stdout);
}

/// As Linux calls it; empty where it does not say.
std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "";
}

}  // namespace

int run(int argc, char** argv) {
  bool help = false;
  const Arguments arguments = read_arguments(argc, argv, help);
  if (help) return 0;
  const ProductKind kind = product_kind(arguments.model);
  const sigset_t signals = block_signals();
  const auto start = std::chrono::steady_clock::now();
  chunkattn::ThreadPool executor(arguments.model.threads);
  const LoadedModel loaded = load(arguments.model, executor);
  Products products(executor, kind);
  try_out(products, loaded.model);
  const EngineOptions options = engine_options(arguments, loaded);
  compute_a_token(loaded.model, products, options);
  auto engine = make_engine(loaded.model, products, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("{}    {}\n", examples::bold("model"), examples::wrapped(describe(loaded.model), 9));
  const auto mib = [](std::size_t chunks, std::size_t bytes) {
    return static_cast<double>(chunks * bytes) / (1 << 20);
  };
  fmt::print("{}      {} chunks of {} tokens, {:.0f} MiB; loaded in {:.1f} s\n",
             examples::bold("K/V"), options.max_chunks, options.chunk_size,
             mib(options.max_chunks, engine->bytes_per_chunk()), seconds.count());
  if (const std::size_t bytes = engine->bytes_per_window_chunk(); bytes > 0)
    fmt::print("{}  {} chunks of layers with a window of {}, {:.0f} MiB\n",
               examples::bold("windows"), options.max_window_chunks, loaded.model.config.window,
               mib(options.max_window_chunks, bytes));

  Served served;
  served.name = model_name(arguments);
  served.tokenizer = loaded.tokenizer.get();
  served.chat = loaded.chat ? &*loaded.chat : nullptr;
  served.no_chat = loaded.no_chat;
  if (const std::string name = processor_name(); !name.empty())
    served.processor = fmt::format("{} thread{}, {}", executor.concurrency(),
                                   executor.concurrency() == 1 ? "" : "s", name);
  served.max_length =
      std::min(static_cast<std::size_t>(loaded.model.config.max_positions),
               (options.max_chunks - 1) * static_cast<std::size_t>(options.chunk_size));
  served.max_choices = arguments.max_choices;
  served.explains = arguments.explained_tokens > 0 && !arguments.http.hides_cached;
  const std::unique_ptr<KvPublisher> publisher = publisher_of(arguments, *engine);
  ServiceOptions service_options = arguments.service;
  if (publisher) service_options.after_step = [to = publisher.get()] { to->flush(); };
  Service service(std::move(engine), *loaded.tokenizer, service_options);
  HttpServer server(service, served, arguments.http);
  const int port = server.bind();
  std::thread http([&] { server.run(); });
  const std::string host = arguments.http.host.find(':') == std::string::npos
                               ? arguments.http.host
                               : "[" + arguments.http.host + "]";
  print_how_to_talk(served, fmt::format("http://{}:{}", host, port),
                    !arguments.http.api_key.empty());

  wait_for_the_end(signals, service);
  if (!service.failure().empty()) {  // clients, and the page, have time to see it
    const timespec two_seconds{2, 0};
    sigtimedwait(&signals, nullptr, &two_seconds);
  }
  fmt::print("{}     no new requests; those that run have {} s, or until another Ctrl-C\n",
             examples::bold("ends"), arguments.drain_seconds);
  std::fflush(stdout);
  service.close();
  drain(signals, service, std::chrono::seconds(arguments.drain_seconds));
  server.stop(std::chrono::seconds(5));
  http.join();
  if (!service.failure().empty())
    throw std::runtime_error("the engine has failed: " + service.failure());
  return 0;
}

}  // namespace serve
