// bench/replay as a user runs it: traces in other spellings, ids of 64 bits, what is refused.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/programs.hpp"
#include "tests/support/nested_json.hpp"

using test::Outcome;

namespace {

namespace fs = std::filesystem;

Outcome run(const std::string& arguments, const std::string& environment = "") {
  return test::run("env -u CHUNKATTN_DATA " + environment +
                   " '" CHUNKATTN_BINARY_DIR "/bench/replay_bench' " + arguments);
}

/// A trace in a file that ends with the test.
class File {
 public:
  explicit File(const std::string& text) : path_(fs::temp_directory_path() / "replay test, 1.log") {
    std::ofstream(path_) << text;
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { fs::remove(path_); }
  [[nodiscard]] std::string path() const { return path_.string(); }
  [[nodiscard]] Outcome replay(const std::string& verb = "") const {
    return run(verb + " '" + path() + "'");
  }

 private:
  fs::path path_;
};

/// Whether the row of a policy without a budget says so many per cent of hits.
bool hits(const Outcome& outcome, const std::string& policy, const std::string& percent) {
  const std::size_t row = outcome.output.find("| " + policy);
  if (row == std::string::npos) return false;
  const std::string line = outcome.output.substr(row, outcome.output.find('\n', row) - row);
  return line.find("unlimited |") != std::string::npos &&
         line.find(" " + percent + " % |") != std::string::npos;
}

/// Twenty times the same eight blocks, a minute apart, so that they share by a cache only.
std::string minutes(const std::string& separator, const std::string& colon) {
  std::string text;
  for (int i = 0; i < 20; ++i) {
    text += "{\"hash_ids\"" + colon + "[7";
    for (int id = 8; id < 15; ++id) text += separator + std::to_string(id);
    text += "]" + separator + "\"output_length\"" + colon + "5" + separator + "\"timestamp\"" +
            colon + std::to_string(i * 60000) + "}\n";
  }
  return text;
}

}  // namespace

TEST_CASE("spellings of JSON mean the same") {
  // 19 of 20 prompts find all but the 12 tokens of the end that are their own: of about 384.
  const Outcome spaced = File(minutes(", ", ": ")).replay();
  CAPTURE(spaced.output);
  CHECK(spaced.status == 0);
  CHECK(hits(spaced, "no retention", "0.00"));
  CHECK(spaced.says("20 requests, "));
  const std::string first = spaced.output.substr(0, spaced.output.find('\n'));
  for (const Outcome& other : {File(minutes(",", ":")).replay("--check"),
                               File("\n" + minutes(" ,\t", " :  ") + " \r\n").replay()}) {
    CAPTURE(other.output);
    CHECK(other.status == 0);
    CHECK(hits(other, "no retention", "0.00"));
    CHECK(other.says(first));
  }
}

TEST_CASE("ids of 64 bits are different blocks") {
  std::string text;
  for (int i = 0; i < 40; ++i) {  // equal in their low 32 bits, or 26, of which 64 tokens are 32
    const std::uint64_t id = std::uint64_t(i / 2) << (i % 2 == 0 ? 32 : 26);
    if (i == 1) continue;  // 0 again
    text += "{\"timestamp\":" + std::to_string(i) + ",\"output_length\":1,\"hash_ids\":[" +
            std::to_string(id) + ",18446744073709551615]}\n";
  }
  const Outcome outcome = File(text).replay();
  CAPTURE(outcome.output);
  CHECK(outcome.status == 0);
  CHECK(outcome.says("39 requests"));
  CHECK(hits(outcome, "LRU", "0.00"));  // even with a cache that forgets nothing
}

TEST_CASE("blocks are the same wherever their ids come from") {
  const std::string tail = ",\"output_length\":3,\"hash_ids\":[9000000000,9000000001,";
  const Outcome outcome =
      File("{\"timestamp\":0.5" + tail + "5]}\n{\"timestamp\":99000" + tail + "6]}\n").replay();
  CAPTURE(outcome.output);
  CHECK(outcome.status == 0);
  CHECK(hits(outcome, "no retention", "0.00"));
  CHECK_FALSE(hits(outcome, "LRU", "0.00"));
  CHECK(outcome.output.find("nan") == std::string::npos);  // budgets in which nothing fits
}

TEST_CASE("what is not understood is refused, with its line") {
  const std::string good = R"({"timestamp": 10, "output_length": 3, "hash_ids": [1, 2]})";
  struct Case {
    std::string line, says;
  };
  const std::vector<Case> cases{
      {R"({"timestamp": 11, "output_length": 3})",
       "hash_ids = missing: expected a list of whole numbers"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": []})",
       "hash_ids = []: expected a list"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": 7})", "hash_ids = 7: expected a list"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": [1, -2]})",
       "hash_ids[1] = -2: expected"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": ["a"]})",
       "hash_ids[0] = \"a\": expected"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": [18446744073709551616]})",
       "hash_ids[0] = 1.8446744073709552e+19: expected a whole number below 2^64"},
      {R"({"output_length": 3, "hash_ids": [1]})", "timestamp = missing: expected milliseconds"},
      {R"({"timestamp": "11", "output_length": 3, "hash_ids": [1]})",
       "timestamp = \"11\": expected milliseconds"},
      {R"({"timestamp": 9, "output_length": 3, "hash_ids": [1]})",
       "timestamp = 9: expected milliseconds, 10 or more"},
      {R"({"timestamp": 11, "hash_ids": [1]})", "output_length = missing: expected"},
      {R"({"timestamp": 11, "output_length": -1, "hash_ids": [1]})",
       "output_length = -1: expected a whole number from 0 to 16777216"},
      {R"({"timestamp": 11, "output_length": 16777217, "hash_ids": [1]})",
       "output_length = 16777217: expected"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": [1, 2], "input_length": 1025})",
       "input_length = 1025: expected 513 to 1024, as hash_ids are 2 blocks of 512 tokens"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": [1, 2], "input_length": 512})",
       "input_length = 512: expected 513"},
      {R"({"timestamp": 11, "output_length": 3, "hash_ids": [1, 2})",
       "no JSON object at column 56"},
      {"[]", "the line = []: expected a JSON object"},
      {"null garbage", "no JSON object at column 6"},
  };
  for (const Case& one : cases) {
    CAPTURE(one.line);
    const File file(good + "\n\n" + good + "\n" + one.line + "\n");
    const Outcome outcome = file.replay();
    CAPTURE(outcome.output);
    CHECK(outcome.status == 1);
    CHECK(outcome.says(file.path() + ":4: " + one.says));
  }
  for (const std::string& nested : test::nested_json())
    for (const std::string& line :
         {nested, R"({"timestamp": 11, "output_length": 3, "hash_ids": )" + nested + "}",
          R"({"timestamp": 11, "output_length": 3, "hash_ids": [)" + nested + "]}"}) {
      const File file(line);
      const Outcome outcome = file.replay();
      CHECK(outcome.status == 1);
      CHECK(outcome.says(file.path() + ":1: nested more than 32 levels deep"));
    }
  const Outcome two = File(good + good).replay();  // on a line
  CHECK(two.status == 1);
  CHECK(two.says(":1: no JSON object at column 58"));
}

TEST_CASE("limits themselves are taken") {
  for (const char* const length : {"513", "1024"}) {
    const Outcome outcome =
        File(std::string(R"({"timestamp": 0, "output_length": 0, "chat": "x", )") +
             R"("hash_ids": [3, 4], "input_length": )" + length + "}")
            .replay();
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(outcome.says("1 requests, "));
  }
}

TEST_CASE("files and command lines") {
  const Outcome missing = run("/nowhere/trace.jsonl");
  CHECK(missing.status == 1);
  CHECK(missing.says("/nowhere/trace.jsonl: No such file or directory"));
  const Outcome empty = File("\n").replay();
  CHECK(empty.status == 1);
  CHECK(empty.says(": no request is in it"));
  for (const char* const words : {"--chek", "a b", "--check a b", "retention -x"}) {
    const Outcome outcome = run(words);
    CHECK(outcome.status == 2);
    CHECK(outcome.says(": expected [--check | schedule | retention] [FILE]"));
  }
  CHECK(run("''").status == 1);

  const Outcome none = run("", "CHUNKATTN_DATA=/nowhere");
  CHECK(none.status == 0);
  CHECK(none.says("/nowhere/traces/mooncake_conversation_trace.jsonl: no trace there"));
  const fs::path folder = fs::temp_directory_path() / "replay test data";
  fs::create_directories(folder / "traces");
  std::ofstream(folder / "traces" / "mooncake_conversation_trace.jsonl") << minutes(", ", ": ");
  const Outcome found = run("", "CHUNKATTN_DATA='" + folder.string() + "'");
  CHECK(found.status == 0);
  CHECK(found.says("20 requests, "));
  fs::remove_all(folder);
}
