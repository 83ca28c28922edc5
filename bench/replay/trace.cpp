#include "trace.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>

#include "random.hpp"

namespace replay {
namespace {

/// Of mean 0 and variance 1.
double nearly_normal(Random& random) {
  double sum = -2;
  for (int i = 0; i < 4; ++i) sum += random.uniform();
  return 1.73 * sum;
}

}  // namespace

std::vector<Request> trace_requests(std::span<const TracedRequest> trace) {
  std::vector<Request> requests;
  for (const TracedRequest& traced : trace) {
    Request request;
    request.arrival = traced.timestamp / 1000;
    request.output = static_cast<int>(traced.output_length * 48 / 512 + 1);
    auto& prompt = request.prompt;
    for (const std::uint32_t block : traced.blocks) {
      const std::uint32_t length = 40 + (block * 2654435761u >> 16) % 17;
      for (std::uint32_t i = 0; i < length; ++i) prompt.push_back(block * 64 + i);
    }
    // Half of a last block is the request's own, as the trace's lengths are not whole blocks.
    for (std::size_t i = prompt.size() - 12; i < prompt.size(); ++i)
      prompt[i] = 0x80000000u + static_cast<Token>(requests.size());
    requests.push_back(std::move(request));
  }
  return requests;
}

std::vector<Request> groups_of_users() {
  Random random(20251123);
  constexpr int groups = 64, requests = 6000;
  constexpr double rate = 70;
  std::vector<std::vector<Token>> system(groups);
  Token next = 1;  // no token occurs twice but by sharing
  for (auto& prompt : system) {
    prompt.resize(random.between(1000, 3000));
    for (Token& token : prompt) token = next++;
  }
  std::vector<Request> all(requests);
  double now = 0;
  for (Request& request : all) {
    now += -std::log(1 - random.uniform()) / rate;
    request.arrival = now;
    request.prompt = system[random.between(0, groups - 1)];
    for (std::size_t own = random.between(50, 400); own > 0; --own)
      request.prompt.push_back(next++);
    request.output = static_cast<int>(random.between(50, 300));
  }
  return all;
}

Blocks trace_blocks(std::span<const TracedRequest> trace) {
  Blocks blocks;
  for (const TracedRequest& traced : trace) blocks.push_back(traced.blocks);
  return blocks;
}

Blocks agent_blocks() {
  Random random(1);
  const auto normal = [&] { return nearly_normal(random); };
  const auto exponential = [&](double mean) { return -std::log(1 - random.uniform()) * mean; };
  struct Session {
    double pace = 0;
    int left = 1;
    std::vector<std::uint32_t> prompt;
  };
  std::vector<Session> sessions(1200);
  std::vector<std::size_t> system(6);
  for (std::size_t& length : system) length = random.between(8, 40);
  using Call = std::pair<double, std::size_t>;  // when, whose
  std::priority_queue<Call, std::vector<Call>, std::greater<>> calls;
  std::uint32_t fresh = 1000;
  double begin = 0;
  for (std::size_t s = 0; s < sessions.size(); ++s) {
    begin += exponential(1);
    Session& session = sessions[s];
    const std::size_t one = random.between(0, 5), other = random.between(0, 5);
    const std::size_t kind = std::min(one, other);
    for (std::size_t i = 0; i < system[kind]; ++i)
      session.prompt.push_back(static_cast<std::uint32_t>(kind * 100 + i));
    for (std::size_t i = random.between(1, 8); i > 0; --i) session.prompt.push_back(fresh++);
    while (session.left < 60 && random.uniform() > 1.0 / 12) ++session.left;
    session.pace = 20 * std::exp(normal());
    calls.emplace(begin, s);
  }
  Blocks prompts;
  while (!calls.empty()) {
    const auto [now, s] = calls.top();
    calls.pop();
    Session& session = sessions[s];
    prompts.push_back(session.prompt);
    if (--session.left == 0) continue;
    for (std::size_t i = random.between(1, 10); i > 0; --i) session.prompt.push_back(fresh++);
    double wait = session.pace * std::exp(0.5 * normal());
    if (random.uniform() < 0.05) wait += exponential(600);
    calls.emplace(now + wait, s);
  }
  return prompts;
}

Blocks retrieval_blocks() {
  Random random(2);
  constexpr std::uint32_t documents = 2000, per_prompt = 5;
  std::vector<double> wanted(documents);
  double sum = 0;
  for (std::uint32_t d = 0; d < documents; ++d) wanted[d] = sum += 1 / std::pow(d + 1, 0.9);
  std::vector<std::uint32_t> length(documents);
  for (auto& blocks : length) blocks = static_cast<std::uint32_t>(random.between(3, 14));
  std::uint32_t fresh = 1u << 24;
  Blocks prompts(12000);
  for (auto& prompt : prompts) {
    for (std::uint32_t i = 0; i < 6; ++i) prompt.push_back(i);
    std::vector<std::uint32_t> chosen;
    while (chosen.size() < per_prompt) {
      const auto at = std::lower_bound(wanted.begin(), wanted.end(), random.uniform() * sum);
      const auto d = static_cast<std::uint32_t>(at - wanted.begin());
      if (std::find(chosen.begin(), chosen.end(), d) == chosen.end()) chosen.push_back(d);
    }
    for (const std::uint32_t d : chosen)
      for (std::uint32_t i = 0; i < length[d]; ++i) prompt.push_back(1000 + d * 16 + i);
    for (std::size_t i = random.between(1, 3); i > 0; --i) prompt.push_back(fresh++);
  }
  return prompts;
}

Blocks editor_blocks() {
  Random random(3);
  constexpr std::size_t persons = 150, own_files = 8, common_files = 40, requests = 14000;
  std::uint32_t fresh = 3;
  std::vector<std::vector<std::uint32_t>> files(common_files + persons * own_files);
  for (auto& file : files)
    for (std::size_t i = random.between(5, 80); i > 0; --i) file.push_back(fresh++);
  struct Person {
    std::vector<std::size_t> files;  // the last one first
    std::size_t cursor = 0;
  };
  std::vector<Person> all(persons);
  using Turn = std::pair<double, std::size_t>;  // when, whose
  std::priority_queue<Turn, std::vector<Turn>, std::greater<>> turns;
  for (std::size_t p = 0; p < persons; ++p) {
    for (std::size_t f = 0; f < own_files; ++f)
      all[p].files.push_back(common_files + p * own_files + f);
    for (std::size_t f = 0; f < 4; ++f) all[p].files.push_back(random.between(0, common_files - 1));
    turns.emplace(600 * random.uniform(), p);
  }
  Blocks prompts;
  while (prompts.size() < requests) {
    const auto [now, p] = turns.top();
    turns.pop();
    Person& person = all[p];
    if (random.uniform() < 1.0 / 15) {
      std::size_t at = 0;
      while (at + 1 < person.files.size() && random.uniform() < 0.6) ++at;
      std::rotate(person.files.begin(), person.files.begin() + static_cast<std::ptrdiff_t>(at),
                  person.files.begin() + static_cast<std::ptrdiff_t>(at) + 1);
      person.cursor = random.between(0, files[person.files[0]].size() - 1);
    }
    auto& file = files[person.files[0]];
    const auto step = static_cast<std::ptrdiff_t>(random.between(0, 6)) - 2;
    const auto moved = static_cast<std::ptrdiff_t>(person.cursor) + step;
    person.cursor =
        std::min(static_cast<std::size_t>(std::max<std::ptrdiff_t>(moved, 0)), file.size() - 1);
    if (random.uniform() < 0.5) {
      const std::size_t back = random.between(0, 3);
      file[person.cursor - std::min(back, person.cursor)] = fresh++;
    }
    std::vector<std::uint32_t> prompt{0, 1, 2};
    prompt.insert(prompt.end(), file.begin(),
                  file.begin() + static_cast<std::ptrdiff_t>(person.cursor) + 1);
    prompt.push_back(fresh++);
    prompts.push_back(std::move(prompt));
    turns.emplace(now + 8 * std::exp(nearly_normal(random)), p);
  }
  return prompts;
}

}  // namespace replay
