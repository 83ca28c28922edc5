// The program as a user runs it: help, mistakes on the command line, foreign files, recorded texts
// in every mode, and what SmolLM2 says.
#include <doctest/doctest.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "files.hpp"
#include "tests/support/nested_json.hpp"
#include "tests/support/programs.hpp"
#include "tiny_gguf.hpp"

namespace {

using test::Outcome;

Outcome run(const std::string& arguments) {
  return test::run("'" SERVE_PROGRAM "' " + arguments);
}

void expect_failure(int status, const std::string& arguments, const std::string& message) {
  CAPTURE(arguments);
  const Outcome outcome = run(arguments);
  CAPTURE(outcome.output);
  CHECK(outcome.status == status);
  CHECK(outcome.output.starts_with("serve: "));
  CHECK(outcome.says(message));
}

std::string stories_arguments(const std::string& folder) {
  return "generate --model '" + folder + "/stories260K.bin' --tokenizer '" + folder +
         "/tok512.bin' ";
}

const std::string tiny_shape =
    R"({"dim": 64, "hidden_dim": 172, "num_layers": 2, "num_qo_heads": 8, "num_kv_heads": 4,)"
    R"( "vocab_size": 300, "max_positions": 256})";

}  // namespace

TEST_CASE("there is help, and what is not known is refused") {
  CHECK(run("--help").says("serve generate"));
  CHECK(run("").status == 0);
  const Outcome help = run("generate --help");
  CHECK(help.status == 0);
  for (const char* option : {"--model FILE", "--prompts FILE.json", "--threads N", "--check"})
    CHECK(help.says(option));
  CHECK(run("generate --help >/dev/full").status == 1);
  expect_failure(2, "nonsense", "nonsense: no such command");
  expect_failure(2, "generate --nonsense", "--nonsense: no such option");
  expect_failure(2, "generate --prompt x", "expected --model FILE or --random SHAPE");
  expect_failure(2, "generate --model x --random y --prompt x", "and not both");
  expect_failure(2, "generate --model x", "expected --prompts FILE.json or --prompt TEXT");
  expect_failure(2, "generate --chunk-size 24", "--chunk-size = 24: expected 8, 16, 32 or 64");
  expect_failure(2, "generate --kv fp8", "--kv = fp8: expected auto|fp32|fp16|bf16");
  expect_failure(2, "generate --check --prompt x", "--check: expected a text");
  expect_failure(2, "generate --products onednn --mode batch_invariant", "--products = onednn");
  expect_failure(2, "generate --model x --prompt x --device cuda --mode batch_invariant",
                 "--device = cuda: expected cpu beside --mode batch_invariant");
  expect_failure(2, "tokenize --model x", "expected both --model FILE and --texts FILE.json");
}

TEST_CASE("what is printed for a person fits 80 columns") {
  const test::TemporaryFile shape("shape.json");
  shape.write(tiny_shape);
  for (const std::string& arguments :
       {std::string("--help"), std::string("bench --help"), std::string("generate --help"),
        std::string("run --help"), std::string("score --help"), std::string("tokenize --help"),
        "bench --requests 2 --prompt-tokens 20 --shared-tokens 9 --completion-tokens 3 --random '" +
            shape.path() + "'",
        "generate --max-tokens 1 --prompt x --random '" + shape.path() + "'"}) {
    std::istringstream output(run(arguments).output);
    for (std::string line; std::getline(output, line);) {
      CAPTURE(line);
      CHECK(line.size() <= 80);
    }
  }
}

TEST_CASE("files that are not what they should be are refused by name") {
  expect_failure(1, "generate --model /nonexistent --prompt x", "/nonexistent: cannot be opened");
  expect_failure(1, "generate --model / --prompt x", "/: not a regular file");
  expect_failure(2, "generate --model '" SERVE_REPOSITORY "/LICENSE' --prompt x", "--tokenizer");
  expect_failure(1, "generate --model '" SERVE_REPOSITORY "/LICENSE' --tokenizer x --prompt x",
                 "LICENSE: not a llama2.c checkpoint: dim = ");
  const test::TemporaryFile prompts("prompts.json");
  const std::string arguments = "generate --random llama2-7b --prompts '" + prompts.path() + "'";
  prompts.write("[{\"prompt\": \"Once\",\n \"steps\" 3}]");
  expect_failure(1, arguments, "prompts.json: JSON: parse error at line 2");
  prompts.write("{}");
  expect_failure(1, arguments, "prompts.json: JSON: type must be array, but is object");
  const test::TemporaryFile shape("shape.json"), tokens("tokens.json"), model("model.gguf");
  shape.write(tiny_shape);
  model.write(test::tiny_gguf().bytes());
  for (const std::string& nested : test::nested_json()) {
    const std::string deep = ".json: JSON: nested more than 32 levels deep";
    prompts.write("[{\"prompt\": " + nested + "}]");
    expect_failure(1, arguments, "prompts" + deep);
    tokens.write("[" + nested + "]");
    expect_failure(1, "score --random '" + shape.path() + "' --tokens '" + tokens.path() + "'",
                   "tokens" + deep);
    expect_failure(1, "tokenize --model '" + model.path() + "' --texts '" + tokens.path() + "'",
                   "tokens" + deep);
  }
  prompts.write(R"([{"prompt": "a"}, {"prompt": "b", "max_tokens": 1.5}])");
  expect_failure(1, arguments, "prompts.json: [1].max_tokens = 1.5: expected 0 to 2^24");
  prompts.write(R"([{"prompt": "a", "messages": []}])");
  expect_failure(1, arguments, "prompts.json: [0]: expected a prompt or messages, and not both");
}

TEST_CASE("random weights of any shape run, and repeat") {
  const test::TemporaryFile shape("shape.json");
  shape.write(tiny_shape);
  const std::string arguments = "generate --random '" + shape.path() +
                                "' --mode batch_invariant --max-tokens 12 --prompt abc --prompt ";
  const Outcome one = run(arguments + "abd --threads 1"), two = run(arguments + "abd --threads 2");
  CAPTURE(one.output);
  CHECK(one.status == 0);
  CHECK(one.says("2 layers, dim 64, 8 query heads over 4 K/V heads of 8"));
  CHECK(one.says("5 of 8 tokens computed, 3 from the tree"));  // bos, a and b
  const auto texts = [](const Outcome& o) { return o.output.substr(0, o.output.find("speed")); };
  CHECK(texts(one) == texts(two));
  const test::TemporaryFile chat("chat.json");
  chat.write(R"([{"messages": [{"role": "user", "content": "Hi"}]}])");
  expect_failure(1, "generate --random '" + shape.path() + "' --prompts '" + chat.path() + "'",
                 "messages: random weights have no chat template");
  shape.write("{\"dim\": 64}");
  expect_failure(1, arguments + "x", "key 'hidden_dim' not found");
}

TEST_CASE("K/V behind windows is given back, or kept") {
  const test::TemporaryFile shape("shape.json"), prompts("prompts.json");
  const std::string fields = tiny_shape.substr(0, tiny_shape.size() - 1);
  shape.write(fields + R"(, "window": 16, "global_every": 2})");
  prompts.write(R"([{"prompt": ")" + std::string(150, 'a') + R"(", "max_tokens": 12}])");
  const std::string arguments = "generate --random '" + shape.path() + "' --prompts '" +
                                prompts.path() +
                                "' --weights fp32 --mode batch_invariant --chunk-size 8 ";
  const Outcome given = run(arguments + "--step-tokens 16"),
                kept = run(arguments + "--windows keep");
  CAPTURE(given.output);
  CAPTURE(kept.output);
  CHECK(given.status == 0);
  CHECK(given.says("windows"));
  CHECK(!kept.says("windows"));
  const auto text = [](const Outcome& o) {
    const std::size_t begin = o.output.find("aaa");
    return o.output.substr(begin, o.output.find("\nprompts") - begin);
  };
  CHECK(text(given) == text(kept));
  const auto held = [](const Outcome& o) {
    return std::stod(o.output.substr(o.output.find("K/V  ") + 5));
  };
  CHECK(held(given) < 0.7 * held(kept));  // of one of two layers
  std::istringstream output(given.output);
  for (std::string line; std::getline(output, line);)
    CHECK((line.size() <= 80 || line.starts_with("aaa") || line.starts_with("#1")));
  shape.write(fields + R"(, "window": 0})");
  expect_failure(1, arguments, "window = 0: expected at least 1");
}

TEST_CASE("a load runs in every mode, and is reported") {
  const test::TemporaryFile shape("shape.json"), report("report.json");
  shape.write(tiny_shape);
  for (const std::string cache : {"tree", "paged", "paged_prefix"}) {
    const Outcome outcome = run("bench --random '" + shape.path() + "' --cache " + cache +
                                " --requests 5 --prompt-tokens 70 --shared-tokens 64 --rate 1000" +
                                " --completion-tokens 8 --json '" + report.path() + "'");
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("5 of 5 done in "));
    const auto json = nlohmann::json::parse(test::read_text(report.path()));
    CHECK(json.at("completed") == 5);
    CHECK(json.at("prompt_tokens") == 5 * 70);
    CHECK(json.at("cached_tokens") == (cache == "paged" ? 0 : 4 * 64));
    CHECK(json.at("batch_kv_bytes") >= json.at("batch_kv_bytes_of_tokens"));
  }
  expect_failure(2, "bench --prompt-tokens 5 --shared-tokens 6", "--shared-tokens = 6");
  expect_failure(2, "bench --shrink 3", "--shrink = 3: expected a power of two up to 512");
  expect_failure(2, "bench --random '" + shape.path() + "' --prompt-tokens 5000",
                 "--prompt-tokens and --completion-tokens = 5064 together");
  expect_failure(1, "bench --random '" + shape.path() + "' --trace /nonexistent",
                 "/nonexistent: cannot be opened");
}

TEST_CASE(
    "a processor without AVX-512 runs all weights, and says how where it is not as asked for") {
  const test::TemporaryFile shape("shape.json");
  shape.write(tiny_shape);
  const std::string generate = "'" SERVE_PROGRAM
                               "' generate --max-tokens 5 --prompt abc --prompt abd --random '" +
                               shape.path() + "'";
  for (const std::string isa : {"avx2", "portable"}) {
    std::string processor =
        "ONEDNN_MAX_CPU_ISA=AVX2 DNNL_MAX_CPU_ISA=AVX2 CHUNKATTN_CPU_ISA=" + isa + " ";
    if (test::run(processor + generate).says("this build has no " + isa + " kernels")) {
      std::printf("in part: this build has no %s kernels, its own are run\n", isa.c_str());
      processor.resize(processor.find("CHUNKATTN_CPU_ISA"));
    }
    for (const char* weights : {"auto", "bf16", "fp32"})
      for (const char* products : {"auto", "own"}) {
        const Outcome outcome =
            test::run(processor + generate + " --weights " + weights + " --products " + products);
        CAPTURE(outcome.output);
        CHECK(outcome.status == 0);
        CHECK(outcome.says("10 tokens generated"));
        // Newer versions of oneDNN have a product in bf16 here, too.
        if (weights == std::string("fp32") || products == std::string("own"))
          CHECK(!outcome.says("refuses"));
        std::istringstream output(outcome.output);
        for (std::string line; std::getline(output, line);) CHECK(line.size() <= 80);
      }
  }
}

TEST_CASE("the recorded texts come out in every mode") {
  const std::string folder = test::stories_folder();
  if (folder.empty()) return;
  const std::string prompts =
      stories_arguments(folder) + "--prompts '" + folder + "/stories260K.prompts.json' --check ";
  for (const char* options :
       {"", "--threads 1", "--threads 2 --chunk-size 8", "--products own", "--stagger 0",
        "--mode spin_lock --chunk-size 16 --sharing chunk",
        "--mode batch_invariant --chunk-size 32", "--stagger 11 --step-tokens 3",
        "--chunk-size 8 --chunks 70 --stagger 0"}) {
    const Outcome outcome = run(prompts + options);
    CAPTURE(options);
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("6 of 6 texts as recorded"));
  }
  for (const char* kv : {"fp16", "bf16"}) {
    const Outcome outcome = run(stories_arguments(folder) + "--prompts '" + folder +
                                "/stories260K.prompts.json' --kv " + kv);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("40 from the tree"));  // what is shared depends on the tokens alone
  }
}

TEST_CASE("--device cuda says why it cannot run, or agrees with the CPU") {
  const test::TemporaryFile shape("shape.json");
  shape.write(tiny_shape);
  const Outcome outcome =
      run("generate --device cuda --prompt Once --random '" + shape.path() + "'");
  CAPTURE(outcome.output);
  if (outcome.status == 2)
    CHECK(outcome.says("--device = cuda: this program was built without CUDA"));
  else if (outcome.status == 1)  // no GPU: the call and its code
    CHECK(outcome.says("cudaGetDeviceCount failed with code "));
  else
    CHECK(outcome.says("of the GPU against the CPU's"));
}

TEST_CASE("--check fails on a text that is not as recorded") {
  const std::string folder = test::stories_folder();
  if (folder.empty()) return;
  const test::TemporaryFile prompts("wrong.json");
  const std::string arguments = stories_arguments(folder) + "--prompts '" + prompts.path() + "'";
  prompts.write(R"([{"prompt": "Once upon a time", "steps": 20, "text": "no"}])");
  CHECK(run(arguments).status == 0);
  const Outcome outcome = run(arguments + " --check");
  CHECK(outcome.status == 1);
  CHECK(outcome.says("differs from byte 0 on"));
  CHECK(outcome.says("0 of 1 texts as recorded"));
  // As an API answers: only what follows the prompt.
  prompts.write(R"([{"prompt": "Once upon a time", "max_tokens": 4, "text": ", there was a"}])");
  CHECK(run(arguments + " --check").status == 0);
}

TEST_CASE("--check says which weights a record needs") {
  const test::TemporaryFile shape("shape.json"), prompts("weights.json");
  shape.write(tiny_shape);
  const std::string arguments =
      "generate --check --random '" + shape.path() + "' --prompts '" + prompts.path() + "' ";
  prompts.write(R"([{"prompt": "a", "max_tokens": 1, "text": "no", "weights": "fp32"}])");
  expect_failure(2, arguments,
                 "weights.json: [0].weights = fp32: the model's are bf16: expected --weights fp32");
  const Outcome fp32 = run(arguments + "--weights fp32");
  CHECK(fp32.status == 1);
  CHECK(fp32.says("differs from byte 0 on"));
  CHECK(!fp32.says("--weights fp32"));
  prompts.write(R"([{"prompt": "a", "max_tokens": 1, "text": "no"}])");
  const Outcome bf16 = run(arguments);
  CHECK(bf16.status == 1);
  CHECK(bf16.says("weights are bf16: texts that were recorded with fp32 need --weights fp32"));
  prompts.write(R"([{"prompt": "a", "weights": "fp64"}])");
  expect_failure(1, arguments, "weights.json: [0].weights = fp64: expected fp32 or bf16");
}

TEST_CASE("SmolLM2 knows its capitals, and what a chat shares") {
  const std::string model = test::smollm2_file();
  if (model.empty()) return;
  const test::TemporaryFile prompts("chat.json");
  prompts.write(R"([{"messages": [{"role": "user", "content": "What is the capital of France?"}],
                     "max_tokens": 12, "text": "The capital of France is Paris."},
                    {"messages": [{"role": "user", "content": "What is the capital of Germany?"}],
                     "max_tokens": 12, "text": "The capital of Germany is Berlin."},
                    {"prompt": "The capital of France is", "max_tokens": 1, "text": " Paris"}])");
  for (const char* options : {"", "--mode batch_invariant --weights fp32"}) {
    const Outcome outcome = run("generate --model '" + model + "' --check --prompts '" +
                                prompts.path() + "' " + options);
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("3 of 3 texts as recorded"));
    CHECK(outcome.says("29 from the tree"));
  }
}
