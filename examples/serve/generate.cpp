// serve generate: runs a list of prompts as one batch that joins and leaves at different steps.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <chunkattn/chunkattn.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../support/cuda_attention.hpp"
#include "../support/options.hpp"
#include "../support/table.hpp"
#include "commands.hpp"
#include "loaded_model.hpp"
#include "model/json_file.hpp"
#include "parallel/parallel_engine.hpp"
#include "ranks/run_rank.hpp"

namespace serve {

namespace {

struct Arguments {
  ModelArguments model;
  std::vector<std::string> prompts;
  std::string prompts_file, sharing = "token", device = "cpu", parallel = "none";
  std::string windows = "give-back";
  int max_tokens = 64, chunk_size = 64, chunks = 0, stagger = 5, step_tokens = 512;
  bool check = false;
};

/// What is to be generated, and what is to come out.
struct Job {
  std::string prompt;
  std::vector<Message> messages;  ///< in place of the prompt
  int max_tokens = 0;
  std::optional<int> steps;  ///< in place of max_tokens: positions, the prompt's included
  std::optional<std::string> text;
  std::string weights;  ///< with which the text was recorded; empty: not said
  std::string field;    ///< where it stands; empty: on the command line
};

Job read_job(const nlohmann::json& entry, const std::string& field, int max_tokens) {
  const auto count = [&](const char* name, int least) {
    const auto& value = entry.at(name);
    if (!value.is_number_integer() || value < least || value > 1 << 24)
      throw FileError(
          fmt::format("{}.{} = {}: expected {} to 2^24", field, name, value.dump(), least));
    return value.get<int>();
  };
  Job job;
  job.max_tokens = entry.contains("max_tokens") ? count("max_tokens", 0) : max_tokens;
  if (entry.contains("steps")) job.steps = count("steps", 1);
  if (entry.contains("text")) job.text = entry.at("text").get<std::string>();
  job.field = field;
  if (entry.contains("weights")) job.weights = entry.at("weights").get<std::string>();
  if (!job.weights.empty() && job.weights != "fp32" && job.weights != "bf16")
    throw FileError(fmt::format("{}.weights = {}: expected fp32 or bf16", field, job.weights));
  if (entry.contains("prompt") == entry.contains("messages"))
    throw FileError(field + ": expected a prompt or messages, and not both");
  if (entry.contains("prompt")) {
    job.prompt = entry.at("prompt").get<std::string>();
    return job;
  }
  for (const auto& message : entry.at("messages").get<std::vector<nlohmann::json>>())
    job.messages.push_back(
        {message.at("role").get<std::string>(), message.at("content").get<std::string>()});
  return job;
}

std::vector<Job> read_jobs(const Arguments& arguments) {
  std::vector<Job> jobs;
  for (const std::string& prompt : arguments.prompts)
    jobs.push_back({prompt, {}, arguments.max_tokens, {}, {}, {}, {}});
  if (!arguments.prompts_file.empty()) {
    with_json(arguments.prompts_file, read_text(arguments.prompts_file),
              [&](const nlohmann::json& document) {
                for (const auto& entry : document.get<std::vector<nlohmann::json>>())
                  jobs.push_back(
                      read_job(entry, fmt::format("{}: [{}]", arguments.prompts_file, jobs.size()),
                               arguments.max_tokens));
              });
  }
  if (jobs.empty()) throw examples::UsageError("expected --prompts FILE.json or --prompt TEXT");
  if (arguments.check &&
      std::none_of(jobs.begin(), jobs.end(), [](const Job& job) { return job.text.has_value(); }))
    throw examples::UsageError("--check: expected a text beside some prompt of --prompts");
  return jobs;
}

const char* weights_of(const Model& model) {
  return model.embedding.element() == Element::fp32 ? "fp32" : "bf16";
}

/// A text is what one kind of weights says: with another, near ties fall the other way.
void check_weights(const std::vector<Job>& jobs, const Model& model) {
  const std::string weights = weights_of(model);
  for (const Job& job : jobs)
    if (job.text && !job.weights.empty() && job.weights != weights)
      throw examples::UsageError(
          fmt::format("{}.weights = {}: the model's are {}: expected --weights {}", job.field,
                      job.weights, weights, job.weights));
}

Request make_request(const Job& job, const LoadedModel& loaded, RequestId id) {
  const Tokenizer& tokenizer = *loaded.tokenizer;
  Request request;
  request.id = id;
  if (job.messages.empty()) {
    request.prompt = tokenizer.encode_prompt(job.prompt);
  } else {
    if (!loaded.chat) throw std::invalid_argument("messages: " + loaded.no_chat);
    request.prompt = tokenizer.encode(loaded.chat->prompt(job.messages));
  }
  if (job.steps) {  // as llama2.c counts: the token that the last position gives is printed, too
    const auto length = static_cast<std::size_t>(*job.steps) + 1;
    request.prompt.resize(std::min(request.prompt.size(), length));
    request.max_length = length;
  } else {
    request.max_length = request.prompt.size() + static_cast<std::size_t>(job.max_tokens);
  }
  return request;
}

/// Enough for all requests at once, each by itself.
std::size_t chunks_for(const std::vector<Request>& requests, const Config& config, int chunk_size) {
  std::size_t chunks = 0;
  for (const Request& request : requests) {
    const auto positions = static_cast<std::size_t>(config.max_positions);
    chunks +=
        std::min(request.max_length, positions + 1) / static_cast<std::size_t>(chunk_size) + 2;
  }
  return chunks;
}

/// What became of a prompt.
struct Text {
  std::vector<int> tokens;  ///< generated ones
  std::size_t cached = 0;   ///< tokens of the prompt
  int first_step = 0, last_step = 0;
};

/// Two requests join together, the next two `stagger` steps later, and so on.
std::vector<Text> run_all(Engine& engine, const std::vector<Request>& requests, int stagger) {
  std::vector<Text> texts(requests.size());
  std::size_t submitted = 0, completed = 0;
  for (int number = 0; completed < requests.size(); ++number) {
    while (submitted < requests.size() &&
           (static_cast<int>(submitted / 2) * stagger <= number || submitted == completed))
      engine.submit(requests[submitted++]);
    engine.step(number);
    for (const Event& event : engine.take_events()) {
      Text& text = texts[static_cast<std::size_t>(event.id)];
      text.last_step = engine.stats().steps;
      if (text.first_step == 0) {
        text.first_step = text.last_step;
        text.cached = event.cached;
      }
      if (event.token >= 0) text.tokens.push_back(event.token);
      if (event.finish != Finish::none) ++completed;
    }
  }
  return texts;
}

/// Whether a text is as it should be: the whole, or what follows the prompt.
bool is_expected(const Job& job, const std::string& whole, const std::string& generated) {
  if (!job.text || whole == *job.text || generated == *job.text) return true;
  const auto [in_whole, in_text] =
      std::mismatch(whole.begin(), whole.end(), job.text->begin(), job.text->end());
  fmt::print("{} from byte {} on; expected:\n{}\n", examples::red("differs"),
             in_whole - whole.begin(), *job.text);
  return false;
}

/// Prints all texts. Returns how many that can be checked are wrong.
int print_texts(const std::vector<Job>& jobs, const std::vector<Request>& requests,
                const std::vector<Text>& texts, const Tokenizer& tokenizer, bool check) {
  int wrong = 0, checked = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const Text& text = texts[i];
    std::vector<int> tokens = requests[i].prompt;
    tokens.insert(tokens.end(), text.tokens.begin(), text.tokens.end());
    const std::string whole = tokenizer.decode(tokens);
    const std::string before = tokenizer.decode(requests[i].prompt);
    const std::string generated = whole.substr(std::min(before.size(), whole.size()));
    const std::string steps = fmt::format(
        "first token in step {}, last in {}; prompt: {} tokens computed, {} from the tree",
        text.first_step, text.last_step, requests[i].prompt.size() - text.cached, text.cached);
    fmt::print("\n{}  {}\n{}\n", examples::bold(fmt::format("#{}", i + 1)), examples::dim(steps),
               jobs[i].messages.empty() ? whole : generated);
    if (!check || !jobs[i].text) continue;
    ++checked;
    if (!is_expected(jobs[i], whole, generated)) ++wrong;
  }
  if (check)
    fmt::print("\n{}    {} of {} texts as recorded\n", examples::bold("check"),
               wrong == 0 ? examples::green(std::to_string(checked))
                          : examples::red(std::to_string(checked - wrong)),
               checked);
  return wrong;
}

void print_stats(const Engine& engine, double seconds) {
  const EngineStats& stats = engine.stats();
  const auto mib = [&](std::size_t chunks, std::size_t window_chunks) {
    return static_cast<double>(kv_bytes_of(engine, chunks, window_chunks)) / (1 << 20);
  };
  const double held = mib(stats.chunks, stats.window_chunks);
  const double unshared = mib(stats.unshared_chunks, stats.unshared_chunks);
  const auto rate = [seconds](std::size_t tokens) {
    return static_cast<double>(tokens) / std::max(seconds, 1e-9);
  };
  fmt::print("\n{}  {} of {} tokens computed, {} from the tree\n", examples::bold("prompts"),
             stats.prompt_tokens - stats.cached_tokens, stats.prompt_tokens, stats.cached_tokens);
  fmt::print("{}   {} chunks where {} tokens by themselves take {}\n", examples::bold("shared"),
             stats.chunks, stats.unshared_tokens, stats.unshared_chunks);
  if (engine.bytes_per_window_chunk() > 0)
    fmt::print("{}  {} chunks, {} tokens computed again; K/V of all was {:.2f} MiB at most\n",
               examples::bold("windows"), stats.window_chunks, stats.window_tokens,
               mib(stats.peak_chunks, stats.peak_window_chunks));
  fmt::print("{}      {:.2f} MiB, by themselves {:.2f}: {:.2f} times as much\n",
             examples::bold("K/V"), held, unshared, unshared / std::max(held, 1e-9));
  fmt::print("{}    {} tokens generated in {:.2f} s: {:.0f}/s; {} through the model: {:.0f}/s\n",
             examples::bold("speed"), stats.generated_tokens, seconds, rate(stats.generated_tokens),
             stats.rows, rate(stats.rows));
  fmt::print("{}    {}, at most {} sequences; {} plan rebuilds; {} preempted, {} tokens again\n",
             examples::bold("steps"), stats.steps, stats.peak_sequences, stats.plan_rebuilds,
             stats.preemptions, stats.recomputed);
}

/// Prints how far the GPU's logits were from the CPU's; true if within the bound.
bool logits_agree(const EngineStats& stats) {
  constexpr double bound = 0.1;  // fp16 rounds by 2^-11, layer after layer; logits are about 10
  const bool agree = stats.largest_difference <= bound;
  const std::string difference = fmt::format("{:.2g}", stats.largest_difference);
  fmt::print("{}   {} of the GPU against the CPU's: {} apart at most (bound {})\n",
             examples::bold("logits"), stats.compared_logits,
             agree ? examples::green(difference) : examples::red(difference), bound);
  return agree;
}

Arguments read_arguments(int argc, char** argv, bool& help) {
  Arguments a;
  examples::Options options("serve generate", "continues many prompts at once, greedily");
  a.model.add_to(options);
  options.texts("--prompt", "TEXT", "a prompt; may be given several times", a.prompts);
  options.text("--prompts", "FILE.json",
               "a list of {\"prompt\" or \"messages\", \"max_tokens\" or \"steps\", \"text\"}",
               a.prompts_file);
  options.flag("--check", "exit with 1 if a text is not as the file has it", a.check);
  options.number("--max-tokens", "N", "tokens to generate where the file does not say",
                 a.max_tokens, 0, 1 << 24);
  options.number("--stagger", "N", "steps between one pair of requests and the next", a.stagger, 0,
                 1 << 20);
  options.number("--step-tokens", "N", "tokens of prompts in one step", a.step_tokens, 1, 1 << 20);
  options.number("--chunk-size", "N", "tokens of a chunk: 8, 16, 32 or 64", a.chunk_size, 8, 64);
  options.number("--chunks", "N", "chunks of K/V; 0: enough for all prompts", a.chunks, 0, 1 << 30);
  options.choice("--sharing", {"token", "chunk"}, "what is shared: any prefix, or whole chunks",
                 a.sharing);
  options.choice("--windows", {"give-back", "keep"},
                 "K/V behind the windows of a model's layers: is free again, or stays as all other",
                 a.windows);
  options.choice("--device", {"cpu", "cuda"}, "where attention runs (cuda: in fp16)", a.device);
  options.choice("--parallel", {"none", "tensor"},
                 "tensor: heads and weights split over the processes of mpirun", a.parallel);
  help = !options.parse(argc, argv);
  // Partial results of all rows' contexts: more memory than such steps have on a GPU here.
  if (a.device == "cuda" && a.model.mode == "batch_invariant")
    throw examples::UsageError("--device = cuda: expected cpu beside --mode batch_invariant");
  if (a.device == "cuda" && !examples::built_with_cuda)
    throw examples::UsageError(examples::no_cuda_message);
  if (a.device == "cuda" && a.parallel != "none")
    throw examples::UsageError("--device = cuda: expected cpu beside --parallel tensor");
  if (a.chunk_size != 8 && a.chunk_size != 16 && a.chunk_size != 32 && a.chunk_size != 64)
    throw examples::UsageError(
        fmt::format("--chunk-size = {}: expected 8, 16, 32 or 64", a.chunk_size));
  return a;
}

int generate_on(Communicator& ranks, const Arguments& arguments) {
  const ProductKind kind = product_kind(arguments.model);
  const std::vector<Job> jobs = read_jobs(arguments);
  chunkattn::ThreadPool executor(thread_count(arguments.model, ranks));
  const LoadedModel loaded = load(arguments.model, executor, ranks);
  if (arguments.check) check_weights(jobs, loaded.model);
  std::vector<Request> requests;
  for (const Job& job : jobs) requests.push_back(make_request(job, loaded, requests.size()));

  EngineOptions options;
  options.chunk_size = arguments.chunk_size;
  if (arguments.sharing == "chunk") options.sharing = chunkattn::TreeOptions::Sharing::chunk;
  options.reduce = reduce_of(arguments.model);
  options.kv = kv_type(arguments.model, loaded.model);
  options.max_chunks = arguments.chunks > 0
                           ? static_cast<std::size_t>(arguments.chunks)
                           : chunks_for(requests, loaded.model.config, arguments.chunk_size);
  options.step_tokens = static_cast<std::size_t>(arguments.step_tokens);
  options.stop = loaded.tokenizer->stop_tokens();
  options.on_gpu = arguments.device == "cuda";
  options.keeps_windows = arguments.windows == "keep";
  Products products(executor, kind, ranks);
  try_out(products, loaded.model);
  auto engine = make_engine(loaded.model, products, options);
  if (ranks.size() > 1) {
    check_setup(ranks, loaded.model, options);
    if (ranks.rank() > 0) return follow(ranks, *engine), 0;
    engine = lead(ranks, std::move(engine));
  }

  fmt::print("{}    {}\n", examples::bold("model"), examples::wrapped(describe(loaded.model), 9));
  if (ranks.size() > 1)
    fmt::print("{}    {}, each with such a part of the model\n", examples::bold("ranks"),
               ranks.size());
  const auto start = std::chrono::steady_clock::now();
  const auto texts = run_all(*engine, requests, arguments.stagger);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const int wrong = print_texts(jobs, requests, texts, *loaded.tokenizer, arguments.check);
  if (wrong > 0 && weights_of(loaded.model) == std::string("bf16"))
    fmt::print(
        "         weights are bf16: texts that were recorded with fp32 need --weights fp32\n");
  print_stats(*engine, seconds);
  // In fp16 a near tie may fall the other way and the text go on differently: there the logits are
  // what is checked.
  const bool good = options.on_gpu ? logits_agree(engine->stats()) || !arguments.check : wrong == 0;
  return good ? 0 : 1;
}

}  // namespace

int generate(int argc, char** argv) {
  bool help = false;
  const Arguments arguments = read_arguments(argc, argv, help);
  if (help) return 0;
  return run_rank(arguments.parallel,
                  [&](Communicator& ranks) { return generate_on(ranks, arguments); });
}

}  // namespace serve
