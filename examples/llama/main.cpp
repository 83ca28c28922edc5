// Runs a llama2.c model for a batch of prompts that share their prefixes: prompts join and leave at
// different steps, each shared prefix is computed once, and the text is that of each prompt alone.
#include <chrono>
#include <chunkattn/chunkattn.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "../support/cuda_attention.hpp"
#include "../support/options.hpp"
#include "../support/table.hpp"
#include "engine.hpp"

namespace {

struct Arguments {
  std::string checkpoint, tokenizer, prompts_file, expected_file;
  std::vector<std::string> prompts;
  std::string kv = "fp32", sharing = "token", reduce = "deterministic", device = "cpu";
  int steps = 256, threads = 0, chunk_size = 16, stagger = 5, prefill_chunk = 64;
  bool check = false;
};

struct Job {
  std::string prompt;
  int steps;
  std::optional<std::string> expected;
};

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw llama::FileError(path + ": cannot be opened");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Job> read_jobs(const Arguments& arguments) {
  std::vector<Job> jobs;
  for (const std::string& prompt : arguments.prompts) jobs.push_back({prompt, arguments.steps, {}});
  if (!arguments.expected_file.empty()) {
    if (jobs.size() != 1)
      throw examples::UsageError("--expect: expected exactly one --prompt beside it");
    std::string text = read_text(arguments.expected_file);
    if (text.ends_with('\n')) text.pop_back();  // the line feed that ends the file
    jobs[0].expected = std::move(text);
  }
  if (!arguments.prompts_file.empty()) {
    try {
      const auto document = nlohmann::json::parse(read_text(arguments.prompts_file));
      for (const auto& entry : document.get<std::vector<nlohmann::json>>()) {
        Job job{entry.at("prompt").get<std::string>(), entry.value("steps", arguments.steps), {}};
        if (entry.contains("text")) job.expected = entry.at("text").get<std::string>();
        jobs.push_back(std::move(job));
      }
    } catch (const nlohmann::json::exception& error) {
      const std::string text = error.what();  // "[its name and number] parse error at ..."
      throw llama::FileError(arguments.prompts_file + ": JSON: " + text.substr(text.find(' ') + 1));
    }
  }
  return jobs;
}

std::vector<llama::Completion> serve(const llama::Model& model,
                                     const std::vector<llama::Request>& requests,
                                     chunkattn::ThreadPool& executor, const Arguments& arguments,
                                     llama::ServeStats& stats) {
  llama::ServeOptions options;
  options.kv = arguments.kv;
  options.device = arguments.device;
  options.prefill_chunk = static_cast<std::size_t>(arguments.prefill_chunk);
  if (arguments.sharing == "chunk") options.sharing = chunkattn::Sharing::chunk;
  if (arguments.reduce == "spin_lock") options.reduce = chunkattn::Reduce::spin_lock;
  switch (arguments.chunk_size) {  // the chunk size is a constant of the tree's type
    case 8:
      return llama::serve<8>(model, requests, executor, options, stats);
    case 16:
      return llama::serve<16>(model, requests, executor, options, stats);
    case 32:
      return llama::serve<32>(model, requests, executor, options, stats);
    default:
      return llama::serve<64>(model, requests, executor, options, stats);
  }
}

void print_stats(const llama::ServeStats& stats, const std::vector<llama::Completion>& completions,
                 const std::vector<llama::Request>& requests, double seconds) {
  std::size_t prompt_tokens = 0, computed = 0, generated = 0;
  for (std::size_t i = 0; i < completions.size(); ++i) {
    prompt_tokens += requests[i].prompt.size();
    computed += completions[i].computed;
    generated += completions[i].tokens.size() -
                 std::min(completions[i].tokens.size(), requests[i].prompt.size());
  }
  fmt::print("\n{}  {} of {} computed, {} from the cache\n", examples::bold("prompt tokens"),
             computed, prompt_tokens, prompt_tokens - computed);
  fmt::print("{}          {} tokens in {:.2f} s ({:.0f}/s), {} steps, at most {} at once\n",
             examples::bold("decode"), generated, seconds, static_cast<double>(generated) / seconds,
             stats.steps, stats.peak_live);
  fmt::print("{}            {} slots at most; {} plan rebuilds\n", examples::bold("tree"),
             stats.peak_slots, stats.plan_rebuilds);
}

/// fp16 rounds K, V, Q and O by 2^-11 of their size, layer after layer; logits are about 10.
constexpr double logit_bound = 0.1;

/// Prints how far the GPU's logits were from the CPU's; true if within the bound, or on the CPU.
bool logits_agree(const llama::ServeStats& stats) {
  if (stats.compared_logits == 0) return true;
  const bool agree = stats.max_logit_difference <= logit_bound;
  const std::string difference = fmt::format("{:.2g}", stats.max_logit_difference);
  const std::string text = fmt::format(
      "{} of the GPU against the CPU's for the same tokens: largest difference {} (bound {})",
      stats.compared_logits, agree ? examples::green(difference) : examples::red(difference),
      logit_bound);
  fmt::print("{}          {}\n", examples::bold("logits"), examples::wrapped(text, 16));
  return agree;
}

std::vector<llama::Request> make_requests(const std::vector<Job>& jobs,
                                          const llama::Tokenizer& tokenizer, int stagger) {
  std::vector<llama::Request> requests;
  for (const Job& job : jobs) {
    // Two join together, the next two `stagger` steps later, and so on.
    const int join_step = static_cast<int>(requests.size() / 2) * stagger;
    requests.push_back({tokenizer.encode(job.prompt), job.steps, join_step});
  }
  return requests;
}

void print_settings(const Arguments& arguments, const llama::Config& c, int threads) {
  fmt::print("{}    {} layers, dim {}, {} query heads over {} K/V heads of {}, {} pieces\n",
             examples::bold("model"), c.num_layers, c.dim, c.num_qo_heads, c.num_kv_heads,
             c.head_dim(), c.vocab_size);
  const std::string kv =
      arguments.device == "cuda" ? "fp16 GPU and " + arguments.kv + " CPU" : arguments.kv;
  const std::string text = fmt::format(
      "chunks of {}, {} K/V, sharing by {}, {} reduce, {} thread{}", arguments.chunk_size, kv,
      arguments.sharing, arguments.reduce, threads, threads == 1 ? "" : "s");
  fmt::print("{}    {}\n", examples::bold("cache"), examples::wrapped(text, 9));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int run_checkpoint(Arguments arguments, chunkattn::ThreadPool& executor) {
  std::vector<Job> jobs = read_jobs(arguments);
  const auto has_text = [](const Job& job) { return job.expected.has_value(); };
  if (arguments.check && std::none_of(jobs.begin(), jobs.end(), has_text))
    throw examples::UsageError("--check: expected texts, from --prompts or --expect");
  if (jobs.empty()) {
    for (const char* prompt :
         {"Once upon a time, there was a little girl named Mia",
          "Once upon a time, there was a dog",
          "Once upon a time, there was a little girl named Zoe", "One day, a cat and a bird"})
      jobs.push_back({prompt, arguments.steps, {}});
  }
  const llama::Model model = llama::load_checkpoint(arguments.checkpoint);
  const auto tokenizer = llama::Tokenizer::load(arguments.tokenizer, model.config.vocab_size);
  print_settings(arguments, model.config, executor.concurrency());

  const auto requests = make_requests(jobs, tokenizer, arguments.stagger);
  llama::ServeStats stats;
  const auto start = std::chrono::steady_clock::now();
  const auto completions = serve(model, requests, executor, arguments, stats);
  const double seconds = seconds_since(start);

  int checked = 0, wrong = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const llama::Completion& completion = completions[i];
    const std::string text = tokenizer.decode(completion.tokens);
    fmt::print("\n{}  {}\n{}\n", examples::bold(fmt::format("#{}", i + 1)),
               examples::dim(fmt::format("steps {} to {}; prompt: {} tokens computed, {} from the "
                                         "cache",
                                         completion.joined, completion.left, completion.computed,
                                         requests[i].prompt.size() - completion.computed)),
               text);
    if (!arguments.check || !jobs[i].expected) continue;
    ++checked;
    if (text == *jobs[i].expected) continue;
    ++wrong;
    const auto differ =
        std::mismatch(text.begin(), text.end(), jobs[i].expected->begin(), jobs[i].expected->end());
    fmt::print("{} from character {} on; expected:\n{}\n", examples::red("differs"),
               differ.first - text.begin(), *jobs[i].expected);
  }
  print_stats(stats, completions, requests, seconds);
  if (arguments.check)
    fmt::print("{}           {} of {} texts as recorded\n", examples::bold("check"),
               wrong == 0 ? examples::green(std::to_string(checked))
                          : examples::red(std::to_string(checked - wrong)),
               checked);
  const bool agree = logits_agree(stats);
  // In fp16 a near tie may fall the other way and the text go on differently: there the logits are
  // what is judged.
  if (arguments.device == "cuda") return agree || !arguments.check ? 0 : 1;
  return wrong == 0 ? 0 : 1;
}

/// Random weights say nothing sensible, but each request must still say what it says alone.
int run_random(const Arguments& arguments, chunkattn::ThreadPool& executor) {
  fmt::print(
      "No weights given, so this runs a small model with random weights.\n"
      "For stories, get the smallest of the llama2.c project's \"tinyllamas\": the\n"
      "checkpoint stories260K.bin and its tokenizer tok512.bin, about 1 MB together.\n"
      "Then\n\n"
      "  llama --checkpoint stories260K.bin --tokenizer tok512.bin\n\n"
      "or put both into a folder models/ and set CHUNKATTN_DATA to the folder above it.\n\n");
  llama::Config config;
  config.dim = 64;
  config.hidden_dim = 172;
  config.num_layers = 4;
  config.num_qo_heads = 8;
  config.num_kv_heads = 4;
  config.vocab_size = 512;
  config.max_positions = 512;
  const llama::Model model = llama::random_model(config, 2024);
  const auto tokenizer = llama::Tokenizer::bytes_only(config.vocab_size);
  print_settings(arguments, config, executor.concurrency());

  const std::string shared =
      "You are a patient librarian. Answer in one sentence, name the shelf, and never guess: if "
      "the catalogue does not list a book, say so. Question: ";
  std::vector<Job> jobs;
  for (const char* question :
       {"where are the atlases?", "where are the maps of Iceland?",
        "where are the maps of Ireland?", "who wrote the red book on bridges?",
        "may I renew a loan?", "may I renew a loan twice?"})
    jobs.push_back({shared + question, std::min(arguments.steps, 256), {}});
  const auto requests = make_requests(jobs, tokenizer, arguments.stagger);

  llama::ServeStats stats;
  const auto start = std::chrono::steady_clock::now();
  const auto completions = serve(model, requests, executor, arguments, stats);
  const double seconds = seconds_since(start);

  std::size_t equal = 0;
  fmt::print("\n");
  examples::Table table({"#", "steps", "prompt", "computed", "cached", "generated", "<as alone"});
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    llama::ServeStats ignored;
    const bool same = serve(model, {requests[i]}, executor, arguments, ignored)[0].tokens ==
                      completions[i].tokens;
    equal += same ? 1u : 0u;
    const std::size_t prompt = requests[i].prompt.size();
    table.row({std::to_string(i + 1),
               fmt::format("{}-{}", completions[i].joined, completions[i].left),
               std::to_string(prompt), std::to_string(completions[i].computed),
               std::to_string(prompt - completions[i].computed),
               std::to_string(completions[i].tokens.size() -
                              std::min(completions[i].tokens.size(), prompt)),
               same ? examples::green("yes") : examples::red("no")});
  }
  table.print();
  print_stats(stats, completions, requests, seconds);
  const bool agree = logits_agree(stats);
  const bool good = arguments.device == "cuda" ? agree : equal == jobs.size();
  return good || !arguments.check ? 0 : 1;
}

int run(int argc, char** argv) {
  Arguments arguments;
  examples::Options options("llama", "generates text with a llama2.c model, many prompts at once");
  options.text("--checkpoint", "FILE", "weights, e.g. stories260K.bin", arguments.checkpoint);
  options.text("--tokenizer", "FILE", "its tokenizer, e.g. tok512.bin", arguments.tokenizer);
  options.texts("--prompt", "TEXT", "a prompt; may be given several times", arguments.prompts);
  options.text("--prompts", "FILE.json", "a list of {\"prompt\", \"steps\", \"text\"}",
               arguments.prompts_file);
  options.text("--expect", "FILE", "what the single --prompt must give", arguments.expected_file);
  options.flag("--check", "exit with 1 if a text is not as recorded", arguments.check);
  options.number("--steps", "N", "positions to run, the prompt included", arguments.steps, 1,
                 1 << 20);
  options.number("--stagger", "N", "steps between one pair of requests and the next",
                 arguments.stagger, 0, 1 << 20);
  options.number("--prefill", "N", "prompt tokens of one request in one step",
                 arguments.prefill_chunk, 1, 1 << 20);
  options.number("--threads", "N", "0: one for each processor", arguments.threads, 0, 1024);
  options.number("--chunk-size", "N", "tokens of a chunk: 8, 16, 32 or 64", arguments.chunk_size, 8,
                 64);
  options.choice("--kv", {"fp32", "fp16", "bf16"}, "what K and V are stored as", arguments.kv);
  options.choice("--sharing", {"token", "chunk"}, "what is shared: any prefix, or whole chunks",
                 arguments.sharing);
  options.choice("--reduce", {"deterministic", "spin_lock"}, "how partial results are merged",
                 arguments.reduce);
  options.choice("--device", {"cpu", "cuda"}, "where attention runs (cuda: in fp16)",
                 arguments.device);
  if (!options.parse(argc, argv)) return 0;
  if (arguments.device == "cuda" && !examples::built_with_cuda)
    throw examples::UsageError(examples::no_cuda_message);
  if (arguments.chunk_size != 8 && arguments.chunk_size != 16 && arguments.chunk_size != 32 &&
      arguments.chunk_size != 64)
    throw examples::UsageError(
        fmt::format("--chunk-size = {}: expected 8, 16, 32 or 64", arguments.chunk_size));

  const char* data = std::getenv("CHUNKATTN_DATA");
  if (arguments.checkpoint.empty() && arguments.tokenizer.empty() && data != nullptr) {
    arguments.checkpoint = std::string(data) + "/models/stories260K.bin";
    arguments.tokenizer = std::string(data) + "/models/tok512.bin";
  }
  chunkattn::ThreadPool executor(arguments.threads);
  if (arguments.checkpoint.empty() && arguments.tokenizer.empty()) {
    if (!arguments.prompts.empty() || !arguments.prompts_file.empty() ||
        !arguments.expected_file.empty())
      throw examples::UsageError("prompts need weights: --checkpoint FILE --tokenizer FILE");
    return run_random(arguments, executor);
  }
  if (arguments.checkpoint.empty() || arguments.tokenizer.empty())
    throw examples::UsageError("expected both --checkpoint FILE and --tokenizer FILE");
  return run_checkpoint(std::move(arguments), executor);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::guarded("llama", [&] { return run(argc, argv); });
}
