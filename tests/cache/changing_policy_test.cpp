// Policies of users whose answers change from call to call: at random, or by a clock.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;

namespace {

/// What a policy has been asked since the last insert(), and the first answer out of range.
struct Answers {
  test::Random random;
  double wrong = 0;  // how often an answer is out of range
  int levels = 0, weights = 0, quotas = 0;
  bool has_wrong_level = false, has_wrong_weight = false, has_wrong_quota = false;

  explicit Answers(std::uint64_t stream) : random(stream) {}
  void forget() {
    levels = weights = quotas = 0;
    has_wrong_level = has_wrong_weight = has_wrong_quota = false;
  }
  template <std::size_t N, std::size_t M>
  std::int64_t draw(const std::int64_t (&right)[N], const std::int64_t (&wrong_ones)[M],
                    bool& has_wrong) {
    if (!random.chance(wrong)) return random.pick(right);
    has_wrong = true;
    return random.pick(wrong_ones);
  }
  std::int64_t level() {
    ++levels;
    static constexpr std::int64_t right[] = {0, 0, 1, -1, 2, 7, -40, 2147483647, -2147483648};
    static constexpr std::int64_t wrong_ones[] = {2147483648, -2147483649, std::int64_t{1} << 32,
                                                  (std::int64_t{1} << 40) + 1,
                                                  std::numeric_limits<std::int64_t>::min()};
    return draw(right, wrong_ones, has_wrong_level);
  }
  std::int64_t weight() {
    ++weights;
    static constexpr std::int64_t right[] = {1, 1, 2, 3, 1 << 20};
    static constexpr std::int64_t wrong_ones[] = {0, -1, (1 << 20) + 1,
                                                  (std::int64_t{1} << 32) + 1};
    return draw(right, wrong_ones, has_wrong_weight);
  }
  std::int64_t quota() {
    ++quotas;
    static constexpr std::int64_t right[] = {0, 1,    2,
                                             5, 1000, std::numeric_limits<std::int64_t>::max()};
    static constexpr std::int64_t wrong_ones[] = {-1, std::numeric_limits<std::int64_t>::min()};
    return draw(right, wrong_ones, has_wrong_quota);
  }
};

/// Each answer is drawn when it is asked for.
struct Drawn : CachePolicy {
  std::shared_ptr<Answers> answers;
  [[nodiscard]] std::int64_t level(int) const noexcept { return answers->level(); }
  [[nodiscard]] std::int64_t weight(std::uint64_t) const noexcept { return answers->weight(); }
  [[nodiscard]] std::int64_t quota(std::uint64_t) const noexcept { return answers->quota(); }
};
/// The same without a component's order.
struct DrawnAlone : RetentionOptions {
  std::shared_ptr<Answers> answers;
  [[nodiscard]] std::int64_t level(int) const noexcept { return answers->level(); }
};
/// Ages what is cached: each second call is one level above the last one.
struct Clocked : CachePolicy {
  std::shared_ptr<Answers> answers;
  [[nodiscard]] int level(int priority) const noexcept { return priority + answers->levels++ / 2; }
  [[nodiscard]] std::uint32_t weight(std::uint64_t) const noexcept {
    return 1 + static_cast<std::uint32_t>(answers->weights++ % 3);
  }
  [[nodiscard]] std::size_t quota(std::uint64_t) const noexcept {
    return static_cast<std::size_t>(answers->quotas++ % 9);
  }
};

/// Random calls of a tree, which is counted again after each.
template <class Policy>
class Calls {
 public:
  using Tree = PrefixTree<int, 4, PoolAllocator, Policy>;
  using Sequence = typename Tree::Sequence;

  Calls(Policy policy, TreeOptions options, std::shared_ptr<Answers> answers, std::uint64_t stream)
      : random_(stream),
        answers_(std::move(answers)),
        tree_(PoolAllocator{.max_chunks = 40}, options, std::move(policy)) {}

  void call() {
    const int what = random_.uniform(0, 99);
    if (what < 45 || live_.empty())
      insert();
    else if (what < 70)
      leave();
    else if (what < 80)
      test::load(any());
    else if (what < 86)
      fork();
    else if (what < 92)
      decode();
    else if (what < 96)
      pin();
    else if (what < 99)
      tree_.trim(random_.index(40));
    else
      tree_.clear();
    check_invariants(tree_);
  }
  void end() {
    pins_.clear();
    live_.clear();
    check_invariants(tree_);
    while (tree_.trim(0) > 0) check_invariants(tree_);
    CHECK(tree_.stats().used_chunks == 0);
  }
  [[nodiscard]] int num_refused() const { return num_refused_; }

 private:
  Sequence& any() { return live_[random_.index(live_.size())]; }
  std::vector<int> prompt() {
    std::vector<int> tokens(1 + random_.index(24));
    for (int& token : tokens) token = random_.uniform(0, 1);
    return tokens;
  }
  InsertOptions options() {
    return {.name_space = {.tenant = random_.index(5)},
            .public_length = random_.chance(0.3) ? random_.index(12) : 0,
            .compute_last = random_.chance(0.5),
            .priority = random_.uniform(-2, 2)};
  }

  void insert() {
    const auto tokens = prompt();
    const InsertOptions how = options();
    const std::string before = to_text(tree_);
    const TreeStats stats = tree_.stats();
    if constexpr (!std::is_same_v<Policy, Clocked>) answers_->forget();
    std::string refusal;
    try {
      if (auto s = tree_.try_insert(tokens, how)) live_.push_back(*std::move(s));
    } catch (const InvalidArgument& error) {
      refusal = error.what();
    }
    if constexpr (std::is_same_v<Policy, Clocked>) {
      CHECK(refusal == "");
    } else {
      CHECK(answers_->levels == 1);
      CHECK(answers_->weights <= 1);
      CHECK(answers_->quotas <= 1);
      const char* const wrong = answers_->has_wrong_level    ? "level(priority) = "
                                : answers_->has_wrong_weight ? "weight(tenant) = "
                                : answers_->has_wrong_quota  ? "quota(tenant) = "
                                                             : nullptr;
      CHECK((wrong == nullptr) == refusal.empty());
      if (wrong == nullptr) return;
      CHECK(refusal.starts_with(wrong));
      CHECK(to_text(tree_) == before);
      CHECK(tree_.stats().failed_inserts == stats.failed_inserts);
      CHECK(tree_.stats().inserts == stats.inserts);
      ++num_refused_;
    }
  }
  void leave() {
    std::swap(any(), live_.back());
    if (random_.chance(0.7)) test::load(live_.back());
    live_.pop_back();
  }
  void fork() {
    Sequence& s = any();
    const std::size_t length = 1 + random_.index(s.size());
    if (s.num_reserved() == 0 && length <= s.size())
      if (auto forked = s.try_fork(length)) live_.push_back(*std::move(forked));
  }
  void decode() {
    test::decode(tree_, plan_, live_, [&](const auto&) { return random_.uniform(0, 1); });
  }
  void pin() {
    if (pins_.size() > 3 || (!pins_.empty() && random_.chance(0.3))) return pins_.clear();
    pins_.push_back(tree_.pin(prompt(), options()));
  }

  test::Random random_;
  std::shared_ptr<Answers> answers_;
  Tree tree_;
  AttentionPlan plan_;
  std::vector<Sequence> live_;
  std::vector<typename Tree::Pin> pins_;
  int num_refused_ = 0;
};

template <class Policy>
int run_calls(Policy policy, std::uint64_t stream, double wrong) {
  int num_refused = 0;
  for (const auto sharing : {TreeOptions::Sharing::token, TreeOptions::Sharing::chunk}) {
    policy.answers = std::make_shared<Answers>(stream + 100);
    policy.answers->wrong = wrong;
    policy.max_pinned = 12;
    Calls<Policy> calls(policy, {.sharing = sharing}, policy.answers, stream);
    for (int i = 0; i < 400; ++i) calls.call();
    calls.end();
    num_refused += calls.num_refused();
  }
  return num_refused;
}

}  // namespace

TEST_CASE("a policy may answer at random, and what is out of range is refused before anything") {
  int num_refused = 0;
  for (int round = 0; round < test::scaled(2); ++round)
    for (const bool learns : {false, true})
      for (const bool fair : {false, true}) {
        CAPTURE(round);
        CAPTURE(learns);
        CAPTURE(fair);
        Drawn policy;
        policy.learns = learns;
        policy.fair = fair;
        const auto stream = static_cast<std::uint64_t>(round);
        CHECK(run_calls(policy, stream, 0) == 0);
        num_refused += run_calls(policy, stream, 0.1);
        run_calls(DrawnAlone{}, stream, 0.1);
      }
  CHECK(num_refused > 0);
}

TEST_CASE("a policy may answer by a clock") {
  for (int round = 0; round < test::scaled(2); ++round)
    for (const bool learns : {false, true})
      for (const bool fair : {false, true}) {
        CAPTURE(round);
        CAPTURE(learns);
        CAPTURE(fair);
        Clocked policy;
        policy.learns = learns;
        policy.fair = fair;
        run_calls(policy, static_cast<std::uint64_t>(round), 0);
      }
}
