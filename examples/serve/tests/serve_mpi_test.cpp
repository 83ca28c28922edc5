// Processes of an MPI job: collectives with the same bits everywhere, recorded texts from several
// ranks, and a job that ends with a message when one rank fails.
#include <doctest/doctest.h>

#include <string>

#include "files.hpp"
#include "tests/support/programs.hpp"
#include "tests/support/random.hpp"
#include "tiny_gguf.hpp"

namespace {

/// As root and with more ranks than processors, which give way to each other; no network and no
/// binding. One name of each setting is Open MPI 4's, one Open MPI 5's.
const std::string environment =
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
    "PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
    "OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe "
    "OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none "
    "OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=^tcp "
    "OMPI_MCA_btl_vader_single_copy_mechanism=none NO_COLOR=1 ";

/// `command` on so many ranks. It ends after five minutes whatever happens.
test::Outcome run(int ranks, const std::string& command) {
  return test::run("env " + environment + "CHUNKATTN_SEED=" + std::to_string(test::run_seed()) +
                   " timeout -k 10 300 '" SERVE_MPIRUN "' -n " + std::to_string(ranks) + " " +
                   command);
}

/// Whether mpirun can start anything here.
bool have_mpirun() {
  static const test::Outcome outcome = run(2, "echo started");
  if (outcome.status == 0) return true;
  std::printf("skipped: mpirun starts nothing here: %s\n", outcome.output.c_str());
  return false;
}

const std::string ranks_program = "'" SERVE_MPI_RANKS "' ";
const std::string generate = "'" SERVE_PROGRAM "' generate --parallel tensor --check ";

/// Of the model that follows in fp32. The greatest logit leads by 0.14 or more everywhere, a
/// hundred thousand times what another order of sums changes.
const std::string tiny_prompts = R"([
  {"prompt": "a", "max_tokens": 24, "text": "accccb a a a a a a a a a a a a a a"},
  {"prompt": "cba ab", "max_tokens": 24, "text": "cba abababababcccccb a a a a a a a a a"},
  {"prompt": "aabbcc", "max_tokens": 24, "text": "aabbccccccb a a a a a a a a a a a a a a"},
  {"prompt": "abc", "max_tokens": 24, "text": "abc b a a a a a a a a a a a a a a a abcc"}])";

void expect_texts(int ranks, const std::string& arguments, int count) {
  const test::Outcome outcome = run(ranks, generate + arguments);
  CAPTURE(ranks);
  CAPTURE(arguments);
  CAPTURE(outcome.output);
  CHECK(outcome.status == 0);
  const std::string texts = std::to_string(count);
  CHECK(outcome.says(texts + " of " + texts + " texts as recorded"));
  if (ranks > 1) CHECK(outcome.says("ranks    " + std::to_string(ranks) + ", each"));
}

void expect_failure(int ranks, const std::string& command, const std::string& message) {
  const test::Outcome outcome = run(ranks, command);
  CAPTURE(command);
  CAPTURE(outcome.output);
  CHECK(outcome.status != 0);
  CHECK(outcome.status != 124);  // timeout's
  CHECK(outcome.says(message));
}

}  // namespace

TEST_CASE("collectives give all ranks the same bits, and a context may lie on four") {
  if (!have_mpirun()) return;
  const test::Outcome collectives = run(3, ranks_program + "collectives");
  CAPTURE(collectives.output);
  CHECK(collectives.status == 0);
  CHECK(collectives.says("collectives are right"));
  const test::Outcome context = run(4, ranks_program + "context");
  CAPTURE(context.output);
  CHECK(context.status == 0);
  CHECK(context.says("the context is right"));
}

TEST_CASE("a rank that fails ends all, with its message") {
  if (!have_mpirun()) return;
  expect_failure(3, ranks_program + "fail 0", "serve: rank 0 of 3: no more of this");
  expect_failure(3, ranks_program + "fail 2", "serve: rank 2 of 3: no more of this");
  expect_failure(2, ranks_program + "stray", "serve: rank 1 of 2: step and tree: digest = ");
}

TEST_CASE("the same greedy texts come from 1, 2 and 4 ranks") {
  if (!have_mpirun()) return;
  const test::TemporaryFile model("tiny.gguf"), prompts("prompts.json");
  // 8 query heads over 4 K/V heads; a vocabulary of 9, which 2 and 4 do not divide.
  model.write(test::tiny_gguf(true, {.times = 4, .gentle = true}).bytes());
  prompts.write(tiny_prompts);
  const std::string arguments = "--weights fp32 --chunk-size 8 --model '" + model.path() +
                                "' --prompts '" + prompts.path() + "' ";
  expect_texts(1, arguments, 4);
  expect_texts(2, arguments, 4);
  expect_texts(4, arguments + "--mode batch_invariant --chunks 8 --step-tokens 3", 4);
  expect_failure(3, generate + arguments,
                 "num_kv_heads = 4 on 3 ranks: expected a number of ranks that divides it");
}

TEST_CASE("recorded texts come from two ranks") {
  const std::string folder = test::stories_folder();
  if (folder.empty() || !have_mpirun()) return;
  expect_texts(2,
               "--model '" + folder + "/stories260K.bin' --tokenizer '" + folder +
                   "/tok512.bin' --prompts '" + folder + "/stories260K.prompts.json'",
               6);
}

TEST_CASE("SmolLM2 knows its capitals on three ranks") {
  const std::string model = test::smollm2_file();
  if (model.empty() || !have_mpirun()) return;
  const test::TemporaryFile prompts("chat.json");
  prompts.write(R"([{"messages": [{"role": "user", "content": "What is the capital of France?"}],
                     "max_tokens": 12, "text": "The capital of France is Paris."},
                    {"prompt": "The capital of France is", "max_tokens": 1, "text": " Paris"}])");
  expect_texts(3, "--model '" + model + "' --prompts '" + prompts.path() + "'", 2);
}
