// The example programs as a user runs them: help, mistakes on the command line, foreign files, and
// the recorded texts of the llama example in every mode.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../examples/support/json.hpp"

namespace {

namespace fs = std::filesystem;

struct Outcome {
  int status = -1;
  std::string output;  // stdout and stderr
  [[nodiscard]] bool says(const std::string& text) const {
    return output.find(text) != std::string::npos;
  }
};

fs::path program(const std::string& name) {
  return fs::path(CHUNKATTN_BINARY_DIR) / "examples" / name;
}

/// False, with a message, where the examples were not built.
bool have(const std::string& name) {
  const bool found = fs::exists(program(name));
  if (!found) std::printf("skipped: %s is not built\n", program(name).c_str());
  return found;
}

std::string data_folder() {
  const char* folder = std::getenv("CHUNKATTN_DATA");
  return folder != nullptr ? folder : std::string(CHUNKATTN_SOURCE_DIR "/../shared");
}

bool have_models() {
  const bool found = fs::exists(data_folder() + "/models/stories260K.bin");
  if (!found)
    std::printf("skipped: no models/stories260K.bin under %s; set CHUNKATTN_DATA\n",
                data_folder().c_str());
  return found;
}

Outcome run(const std::string& name, const std::string& arguments,
            const std::string& environment = "env -u CHUNKATTN_DATA") {
  const std::string command =
      environment + " '" + program(name).string() + "' " + arguments + " 2>&1";
  Outcome outcome;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> block{};
  for (std::size_t got; (got = std::fread(block.data(), 1, block.size(), pipe)) != 0;)
    outcome.output.append(block.data(), got);
  const int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

fs::path temporary(const std::string& name) {
  return fs::temp_directory_path() / ("chunkattn-cli-" + std::to_string(::getpid()) + "-" + name);
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_usage_error(const std::string& name, const std::string& arguments,
                        const std::string& message) {
  CAPTURE(name);
  CAPTURE(arguments);
  const Outcome outcome = run(name, arguments);
  CAPTURE(outcome.output);
  CHECK(outcome.status == 2);
  CHECK(outcome.output.starts_with(name + ": "));
  CHECK(outcome.says(message));
}

std::string model_arguments() {
  return "--checkpoint '" + data_folder() + "/models/stories260K.bin' --tokenizer '" +
         data_folder() + "/models/tok512.bin' ";
}

}  // namespace

TEST_CASE("help lists every option and ends well") {
  for (const std::string name : {"llama", "shared_prompt"}) {
    if (!have(name)) continue;
    const Outcome outcome = run(name, "--help");
    CHECK(outcome.status == 0);
    for (const char* option : {"--threads N", "--kv fp32|fp16|bf16", "--check", "--help"})
      CHECK(outcome.says(option));
  }
}

TEST_CASE("a mistake on the command line is named, with what was expected") {
  if (!have("llama") || !have("shared_prompt")) return;
  expect_usage_error("llama", "--step 3", "--step: no such option");
  expect_usage_error("llama", "--steps three", "--steps = three: expected a number from 1");
  expect_usage_error("llama", "--steps", "--steps: expected a value");
  expect_usage_error("llama", "--steps 0", "--steps = 0: expected");
  expect_usage_error("llama", "--kv fp8", "--kv = fp8: expected fp32|fp16|bf16");
  expect_usage_error("llama", "--check=yes", "--check takes no value");
  expect_usage_error("llama", "--chunk-size 24", "--chunk-size = 24: expected 8, 16, 32 or 64");
  expect_usage_error("llama", "--checkpoint x.bin", "both --checkpoint FILE and --tokenizer FILE");
  expect_usage_error("llama", "--prompt Once", "prompts need weights");
  expect_usage_error("shared_prompt", "--requests -1", "--requests = -1: expected a number from 1");
  expect_usage_error("shared_prompt", "--num-qo-heads 3 --num-kv-heads 2",
                     "--num-qo-heads = 3: expected a multiple of --num-kv-heads = 2");
  expect_usage_error("shared_prompt", "--device tpu", "--device = tpu: expected cpu|cuda");
}

TEST_CASE("--device cuda says why it cannot run, or agrees with the CPU") {
  for (const std::string name : {"llama", "shared_prompt"}) {
    if (!have(name)) continue;
    const Outcome outcome =
        run(name, "--device cuda --check" + std::string(name == "llama" ? " --steps 60" : ""));
    CAPTURE(outcome.output);
    if (outcome.status == 2)
      CHECK(outcome.says("--device = cuda: this program was built without CUDA"));
    else if (outcome.status == 1)  // no GPU: the call and its code
      CHECK(outcome.says("cudaGetDeviceCount failed with code "));
    else
      CHECK(outcome.status == 0);
  }
}

TEST_CASE("llama refuses files that are not what they should be") {
  if (!have("llama")) return;
  Outcome outcome = run("llama", "--checkpoint /nonexistent --tokenizer /nonexistent");
  CHECK(outcome.status == 1);
  CHECK(outcome.says("/nonexistent: cannot be opened"));
  outcome = run("llama", "--checkpoint '" CHUNKATTN_SOURCE_DIR "/LICENSE' --tokenizer x");
  CHECK(outcome.status == 1);
  CHECK(outcome.says("LICENSE: not a llama2.c checkpoint"));
  if (!have_models()) return;
  const fs::path bad = temporary("bad.json");
  std::ofstream(bad) << "[{\"prompt\": \"Once\",\n \"steps\" 3}]";
  outcome = run("llama", model_arguments() + "--prompts '" + bad.string() + "'");
  fs::remove(bad);
  CHECK(outcome.status == 1);
  CHECK(outcome.says("bad.json: JSON line 2: expected ':'"));
  CHECK(run("llama", model_arguments() + "--check --steps 4").status == 2);
}

TEST_CASE("llama without weights says where to get them and runs a random model") {
  if (!have("llama")) return;
  const Outcome outcome = run("llama", "--check");
  CAPTURE(outcome.output);
  CHECK(outcome.status == 0);
  CHECK(outcome.says("stories260K.bin"));
  CHECK(outcome.says("tok512.bin"));
  CHECK(outcome.says("CHUNKATTN_DATA"));
  CHECK(outcome.says("from the cache"));
}

TEST_CASE("llama reproduces the recorded texts in every mode") {
  if (!have("llama") || !have_models()) return;
  const std::string prompts =
      model_arguments() + "--prompts '" + data_folder() + "/models/stories260K.prompts.json' ";
  const auto expect_all = [](const std::string& arguments) {
    CAPTURE(arguments);
    const Outcome outcome = run("llama", arguments + " --check");
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("6 of 6 texts as recorded"));
  };
  for (const char* threads : {"1", "2"})
    for (const char* reduce : {"deterministic", "spin_lock"})
      for (const char* sharing : {"token", "chunk"})
        expect_all(prompts + "--threads " + threads + " --reduce " + reduce + " --sharing " +
                   sharing + " --chunk-size 8");
  expect_all(prompts + "--chunk-size 64 --stagger 0");
  expect_all(prompts + "--chunk-size 16 --stagger 11 --prefill 3");

  const Outcome greedy = run("llama", model_arguments() + "--prompt '' --expect '" + data_folder() +
                                          "/models/stories260K.greedy.txt' --check");
  CHECK(greedy.status == 0);
  CHECK(greedy.says("1 of 1 texts as recorded"));
  for (const char* kv : {"fp16", "bf16"}) {
    const Outcome outcome = run("llama", prompts + "--kv " + kv);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("40 from the cache"));  // what is shared depends on the tokens alone
  }
}

TEST_CASE("llama --check fails on a text that is not as recorded") {
  if (!have("llama") || !have_models()) return;
  const fs::path file = temporary("wrong.json");
  std::ofstream(file) << "[{\"prompt\": \"Once upon a time\", \"steps\": 20, \"text\": \"no\"}]";
  const std::string arguments = model_arguments() + "--prompts '" + file.string() + "'";
  CHECK(run("llama", arguments).status == 0);
  const Outcome outcome = run("llama", arguments + " --check");
  fs::remove(file);
  CHECK(outcome.status == 1);
  CHECK(outcome.says("differs from character 0 on"));
  CHECK(outcome.says("0 of 1 texts as recorded"));
}

TEST_CASE("custom_allocator gives every block back") {
  if (!have("custom_allocator")) return;
  const Outcome outcome = run("custom_allocator", "");
  CHECK(outcome.status == 0);
  CHECK(outcome.says("35 of them cached"));
  CHECK(outcome.says("23 of 23 blocks are free"));
}

TEST_CASE("shared_prompt writes its figures as JSON") {
  if (!have("shared_prompt")) return;
  const fs::path file = temporary("figures.json");
  for (const char* kv : {"fp32", "fp16", "bf16"}) {
    CAPTURE(kv);
    const Outcome outcome =
        run("shared_prompt", "--requests 6 --num-qo-heads 4 --num-kv-heads 2 --rounds 1 --kv " +
                                 std::string(kv) + " --json '" + file.string() + "'");
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    const auto figures = examples::JsonReader::parse(read_text(file));
    fs::remove(file);
    const auto& memory = figures.at("memory");
    CHECK(memory.at("common_tokens").number() >= 1700);
    CHECK(memory.at("ratio").number() > 4);
    CHECK(memory.at("unused_places").number() < memory.at("paper_unused_bound").number());
    const auto& serving = figures.at("serving");
    CHECK(serving.at("peak_requests").number() == 6);
    CHECK(serving.at("prompt_tokens_computed").number() <
          0.3 * serving.at("prompt_tokens").number());
    const auto& decode = figures.at("decode").array();
    REQUIRE(decode.size() == 4);
    CHECK(decode[3].at("variant").string() == "chunkattn");
    for (const auto& variant : decode) {
      CHECK(variant.at("error_of_bound").number() <= 1);
      CHECK(variant.at("ms_per_step").number() > 0);
    }
  }
}
