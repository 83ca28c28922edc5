// The example programs as a user runs them: help, mistakes on the command line, files, what they
// print. (examples/serve has tests of its own.)
#include <doctest/doctest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/programs.hpp"

using test::Outcome;

namespace {

namespace fs = std::filesystem;

fs::path program(const std::string& name) {
  return fs::path(CHUNKATTN_BINARY_DIR) / "examples" / name;
}

/// False, with a message, where the examples were not built.
bool have(const std::string& name) {
  const bool found = fs::exists(program(name));
  if (!found) std::printf("skipped: %s is not built\n", program(name).c_str());
  return found;
}

Outcome run(const std::string& name, const std::string& arguments,
            const std::string& environment = "env -u CHUNKATTN_DATA") {
  return test::run(environment + " '" + program(name).string() + "' " + arguments);
}

/// As run(), on a terminal of so many columns; false, with a message, where there are no terminals.
/// \param settings  NAME=VALUE of the environment; an empty NAME= stays empty, not unset
bool run_on_terminal(Outcome& outcome, const std::string& name, const std::string& arguments,
                     const std::vector<std::string>& settings, unsigned short columns = 80) {
  winsize size{};
  size.ws_row = 50;
  size.ws_col = columns;
  int terminal = -1;
  const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
  if (child < 0) {
    std::printf("skipped: no pseudo-terminal to be had\n");
    return false;
  }
  if (child == 0) {
    ::unsetenv("NO_COLOR");
    ::unsetenv("CHUNKATTN_DATA");
    for (const std::string& setting : settings) ::putenv(const_cast<char*>(setting.c_str()));
    const std::string command = "exec '" + program(name).string() + "' " + arguments;
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(127);
  }
  std::array<char, 4096> block{};
  for (;;) {
    const ssize_t got = ::read(terminal, block.data(), block.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;  // EIO: the program has ended
    outcome.output.append(block.data(), static_cast<std::size_t>(got));
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(terminal);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  for (std::size_t at; (at = outcome.output.find("\r\n")) != std::string::npos;)
    outcome.output.erase(at, 1);  // the terminal's own
  return true;
}

/// The widest line in columns; what a carriage return starts over counts as a line.
std::size_t widest_line(std::string_view text, std::string& line) {
  std::size_t widest = 0, width = 0, begin = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n' || text[i] == '\r') {
      width = 0;
      begin = i + 1;
    } else if (text[i] == '\x1b') {
      while (i + 1 < text.size() && text[i] != 'm' && text[i] != 'K') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xc0u) != 0x80u && ++width > widest) {
      widest = width;
      line = text.substr(begin, text.find_first_of("\r\n", begin) - begin);
    }
  }
  return widest;
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

}  // namespace

constexpr const char* all_programs[] = {"shared_prompt", "persist"};

TEST_CASE("every program has help, and refuses what it does not know") {
  for (const std::string name : all_programs) {
    if (!have(name)) continue;
    for (const char* option : {"--help", "-h"}) {
      const Outcome outcome = run(name, option);
      CAPTURE(outcome.output);
      CHECK(outcome.status == 0);
      CHECK(outcome.output.starts_with(name + ": "));
      CHECK(outcome.says("--help"));
    }
    expect_usage_error(name, "--nonsense", "--nonsense: no such option");
    expect_usage_error(name, "nonsense", "nonsense: no such option");
    CHECK(run(name, "--help >/dev/full").status == 1);
  }
}

TEST_CASE("help lists every option and ends well") {
  if (!have("shared_prompt")) return;
  const Outcome outcome = run("shared_prompt", "--help");
  CHECK(outcome.status == 0);
  for (const char* option : {"--threads N", "--kv fp32|fp16|bf16", "--check", "--help"})
    CHECK(outcome.says(option));
}

TEST_CASE("a mistake on the command line is named, with what was expected") {
  if (!have("shared_prompt")) return;
  expect_usage_error("shared_prompt", "--request 3", "--request: no such option");
  expect_usage_error("shared_prompt", "--requests three",
                     "--requests = three: expected a number from 1");
  expect_usage_error("shared_prompt", "--requests", "--requests: expected a value");
  expect_usage_error("shared_prompt", "--kv fp8", "--kv = fp8: expected fp32|fp16|bf16");
  expect_usage_error("shared_prompt", "--check=yes", "--check takes no value");
  expect_usage_error("shared_prompt", "--requests -1", "--requests = -1: expected a number from 1");
  expect_usage_error("shared_prompt", "--num-qo-heads 3 --num-kv-heads 2",
                     "--num-qo-heads = 3: expected a multiple of --num-kv-heads = 2");
  expect_usage_error("shared_prompt", "--device tpu", "--device = tpu: expected cpu|cuda");
}

TEST_CASE("--device cuda says why it cannot run, or agrees with the CPU") {
  if (!have("shared_prompt")) return;
  const Outcome outcome = run("shared_prompt", "--device cuda --check");
  CAPTURE(outcome.output);
  if (outcome.status == 2)
    CHECK(outcome.says("--device = cuda: this program was built without CUDA"));
  else if (outcome.status == 1)  // no GPU: the call and its code
    CHECK(outcome.says("cudaGetDeviceCount failed with code "));
  else
    CHECK(outcome.status == 0);
}

TEST_CASE("what cannot end well is said before the work begins") {
  if (!have("shared_prompt")) return;
  const fs::path folder = temporary("folder");
  fs::create_directory(folder);
  for (const auto& [file, reason] :
       {std::pair{std::string("/nonexistent/x.json"), "No such file or directory"},
        std::pair{folder.string(), "Is a directory"}}) {
    const Outcome outcome = run("shared_prompt", "--requests 2 --rounds 1 --json " + file);
    CAPTURE(outcome.output);
    CHECK(outcome.status == 1);
    CHECK(outcome.output == "shared_prompt: " + file + ": cannot be written: " + reason + "\n");
  }
  CHECK(fs::is_empty(folder));
  fs::remove(folder);
}

TEST_CASE("a file is replaced whole or not at all") {
  if (!have("persist")) return;
  const fs::path folder = temporary("folder");
  fs::create_directory(folder);
  const fs::path file = folder / "saved";
  const auto persist = [&](const fs::path& path, const std::string& before = "") {
    return run("persist", "--file '" + path.string() + "'", before + "env -u CHUNKATTN_DATA");
  };
  const auto entries = [&] {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  };

  SUBCASE("it replaces a file, and touches nothing beside it") {
    std::ofstream(file) << "old";
    std::ofstream(file.string() + ".bad") << "mine";
    std::ofstream(file.string() + ".part") << "mine";
    fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
    const Outcome outcome = persist(file);
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(fs::file_size(file) > 1000000);
    CHECK(fs::status(file).permissions() == (fs::perms::owner_read | fs::perms::owner_write));
    CHECK(read_text(file.string() + ".bad") == "mine");
    CHECK(read_text(file.string() + ".part") == "mine");
    CHECK(entries() == 3);
  }
  SUBCASE("a link still leads to the file") {
    fs::create_symlink("saved", folder / "link");
    std::ofstream(file) << "old";
    CHECK(persist(folder / "link").status == 0);
    CHECK(fs::is_symlink(folder / "link"));
    CHECK(fs::file_size(file) > 1000000);
  }
  SUBCASE("a device, a pipe and a folder are refused and stay what they are") {
    fs::create_symlink("/dev/full", folder / "device");  // a link: the test may run as root
    REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
    fs::create_directory(folder / "folder");
    const char* const names[] = {"device", "pipe", "folder"};
    for (const char* name : names) {
      const Outcome outcome = persist(folder / name);
      CAPTURE(outcome.output);
      CHECK(outcome.status == 1);
      CHECK(outcome.says("cannot be written: "));
      CHECK(outcome.says(std::string(name) == "folder" ? "Is a directory" : "not a regular file"));
    }
    CHECK(fs::is_symlink(folder / "device"));
    CHECK(fs::is_character_file(folder / "device"));
    CHECK(fs::is_fifo(folder / "pipe"));
    CHECK(fs::is_empty(folder / "folder"));
    CHECK(entries() == 3);
  }
  SUBCASE("a file that does not fit leaves the old one") {
    std::ofstream(file) << "old";
    const Outcome outcome = persist(file, "trap '' XFSZ; ulimit -f 16; ");
    CAPTURE(outcome.output);
    CHECK(outcome.status == 1);
    CHECK(outcome.output == "persist: " + file.string() + ": cannot be written: File too large\n");
    CHECK(read_text(file) == "old");
    CHECK(entries() == 1);
  }
  SUBCASE("JSON goes to a device too, and its error is reported") {
    if (!have("shared_prompt")) return;
    const std::string small =
        "--requests 2 --rounds 1 --num-qo-heads 2 --num-kv-heads 2 --no-tree --json ";
    fs::create_symlink("/dev/full", folder / "full");
    Outcome outcome = run("shared_prompt", small + "'" + (folder / "full").string() + "'");
    CAPTURE(outcome.output);
    CHECK(outcome.status == 1);
    CHECK(outcome.says("cannot be written: No space left on device"));
    CHECK(fs::is_symlink(folder / "full"));
    CHECK(run("shared_prompt", small + "/dev/stdout | grep -q '\"program\": \"shared_prompt\"'")
              .status == 0);
  }
  fs::remove_all(folder);
}

TEST_CASE("colours and a progress line only where they can be seen") {
  if (!have("shared_prompt")) return;
  const std::string small =
      "--requests 32 --rounds 1 --num-qo-heads 2 --num-kv-heads 2 --memory 0 --threads 2";
  const auto coloured = [](const Outcome& outcome) {
    for (std::size_t at = 0; (at = outcome.output.find("\x1b[", at)) != std::string::npos; ++at)
      if (outcome.output[outcome.output.find_first_not_of("0123456789;", at + 2)] == 'm')
        return true;
    return false;
  };
  const auto rewrites = [](const Outcome& outcome) { return outcome.says("\r\x1b[K"); };
  struct Case {
    std::vector<std::string> settings;
    bool colours, progress;
  };
  for (const Case& c :
       {Case{{"TERM=xterm"}, true, true}, Case{{"TERM=xterm", "NO_COLOR=1"}, false, true},
        Case{{"TERM=xterm", "NO_COLOR="}, true, true}, Case{{"TERM=dumb"}, false, false},
        Case{{"TERM=dumb", "NO_COLOR=1"}, false, false}}) {
    Outcome outcome;
    if (!run_on_terminal(outcome, "shared_prompt", small, c.settings)) return;
    CAPTURE(c.settings.size());
    CAPTURE(c.settings[0]);
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
    CHECK(coloured(outcome) == c.colours);
    CHECK(rewrites(outcome) == c.progress);
    if (!c.progress) CHECK(outcome.output.find_first_of("\r\x1b") == std::string::npos);
    std::string line;
    CHECK(widest_line(outcome.output, line) <= 80);
    CAPTURE(line);
  }
  Outcome narrow;
  if (!run_on_terminal(narrow, "shared_prompt", small, {"TERM=xterm"}, 50)) return;
  for (std::size_t at = 0; (at = narrow.output.find("\r\x1b[K", at)) != std::string::npos; ++at) {
    const std::string_view rest = std::string_view(narrow.output).substr(at + 4);
    std::string line;
    CHECK(widest_line(rest.substr(0, rest.find_first_of("\r\n")), line) <= 50);
  }
}

TEST_CASE("what is printed for a person fits 80 columns") {
  for (const std::string name : all_programs) {
    if (!have(name)) continue;
    const std::string small =
        name == "shared_prompt" ? "--rounds 1 --num-qo-heads 4 --num-kv-heads 4 --check" : "";
    for (const std::string& arguments : {small, std::string("--help")}) {
      std::string line;
      const std::size_t widest = widest_line(run(name, arguments).output, line);
      CAPTURE(name);
      CAPTURE(line);
      CHECK(widest <= 80);
    }
  }
}

TEST_CASE("small examples: one idea in 60 lines, and the page shows what they print") {
  const fs::path root(CHUNKATTN_SOURCE_DIR);
  const std::string page = read_text(root / "docs/examples.md");
  int programs = 0;
  for (const auto& entry : fs::directory_iterator(root / "examples")) {
    if (entry.path().extension() != ".cpp") continue;
    ++programs;
    const std::string name = entry.path().stem().string();
    CAPTURE(name);
    std::istringstream source(read_text(entry.path()));
    int lines = 0;
    for (std::string line; std::getline(source, line); ++lines) {
      CAPTURE(line);
      if (line.starts_with("#include"))
        CHECK((line.find("<chunkattn/") != line.npos || line.find_first_of("./") == line.npos));
    }
    CHECK(lines <= 60);

    const std::string heading = "\n## [`" + name + ".cpp`](../examples/" + name + ".cpp)\n";
    const std::string begin = "\n```output\n", end = "```\n";
    const std::size_t section = page.find(heading);
    REQUIRE(section != page.npos);
    const std::size_t shown = page.find(begin, section) + begin.size();
    REQUIRE(shown < page.find("\n## ", section + 1));
    if (!have(name)) continue;
    const Outcome outcome = run(name, "");
    CHECK(outcome.status == 0);
    CHECK(outcome.output == page.substr(shown, page.find(end, shown) - shown));
  }
  CHECK(programs == 9);
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
    const auto figures = nlohmann::json::parse(read_text(file));
    fs::remove(file);
    const auto& memory = figures.at("memory");
    CHECK(memory.at("common_tokens").get<double>() >= 1700);
    CHECK(memory.at("ratio").get<double>() > 4);
    CHECK(memory.at("unused_places").get<double>() < memory.at("paper_unused_bound").get<double>());
    const auto& serving = figures.at("serving");
    CHECK(serving.at("peak_requests").get<double>() == 6);
    CHECK(serving.at("prompt_tokens_computed").get<double>() <
          0.3 * serving.at("prompt_tokens").get<double>());
    const auto& decode = figures.at("decode");
    REQUIRE(decode.size() == 4);
    CHECK(decode[3].at("variant").get<std::string>() == "chunkattn");
    for (const auto& variant : decode) {
      CHECK(variant.at("of_limit").get<double>() > 0);
      CHECK(variant.at("of_limit").get<double>() <= 1);  // nothing is faster than the machine
      CHECK(variant.at("error_of_bound").get<double>() <= 1);
      CHECK(variant.at("ms_per_step").get<double>() > 0);
    }
  }
}
