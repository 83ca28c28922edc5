// Which instruction set runs, what is said to who asks for one that cannot, and that each computes
// what the oracle does.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <span>
#include <string>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/refused.hpp"

using namespace chunkattn;

namespace {

constexpr InstructionSet all_sets[] = {InstructionSet::portable, InstructionSet::neon,
                                       InstructionSet::avx2, InstructionSet::avx512,
                                       InstructionSet::amx};

bool is_compiled(InstructionSet set) {
  for (const InstructionSet compiled : detail::cpu::compiled_sets)
    if (compiled == set) return true;
  return false;
}

// The environment variable for as long as it lives, then what it was.
class Forced {
 public:
  explicit Forced(const char* value) {
    if (const char* const old = std::getenv(name)) before_ = old;
    set(value);
  }
  ~Forced() { set(before_ ? before_->c_str() : nullptr); }

 private:
  static void set(const char* value) {
#if defined(_WIN32)
    ::_putenv_s(name, value != nullptr ? value : "");
#else
    if (value != nullptr)
      setenv(name, value, 1);
    else
      unsetenv(name);
#endif
  }
  static constexpr const char* name = "CHUNKATTN_CPU_ISA";
  std::optional<std::string> before_;
};

}  // namespace

#if CHUNKATTN_EXCEPTIONS

namespace {

// Those that run here, the best first.
std::string running() {
  std::string names;
  for (std::size_t i = std::size(detail::cpu::compiled_sets); i-- > 0;)
    if (detail::cpu::is_supported(detail::cpu::compiled_sets[i]))
      names += (names.empty() ? "" : ", ") + std::string(name_of(detail::cpu::compiled_sets[i]));
  return names;
}

// What is said of a set that does not run here.
std::string refusal(InstructionSet set) {
  const std::string name = name_of(set);
  const std::string text = name + ": expected one of " + running() + "; ";
  if (!is_compiled(set)) return text + "this build has no " + name + " kernels";
#if defined(__x86_64__)
  if (set == InstructionSet::amx && detail::cpu::amx_state() == detail::cpu::AmxState::refused)
    return text + "the operating system refuses " + name;
#endif
  return text + "this processor lacks " + name;
}

}  // namespace

TEST_CASE("one that cannot run is refused: it says which can, and what that one lacks") {
  int refused = 0;
  for (const InstructionSet set : all_sets) {
    CAPTURE(name_of(set));
    const bool runs = is_compiled(set) && detail::cpu::is_supported(set);
    refused += !runs;
    const std::string by_option =
        test::refused([&] { ChunkAttention<Cpu, 8> attention(1, {.instruction_set = set}); });
    CHECK(by_option == (runs ? "no error" : "options.instruction_set = " + refusal(set)));
    const Forced forced(name_of(set));
    const std::string by_variable = test::refused([] { ChunkAttention<Cpu, 8> attention(1); });
    CHECK(by_variable == (runs ? "no error" : "CHUNKATTN_CPU_ISA = " + refusal(set)));
    if (runs) CHECK(std::string(instruction_set()) == name_of(set));
  }
  CHECK(refused > 0);  // no build has NEON and AVX
  CHECK(test::refused([] { ChunkAttention<Cpu, 8>(1, {.instruction_set = InstructionSet{77}}); }) ==
        "options.instruction_set = no instruction set: expected one of " + running());
}

TEST_CASE("a name that no instruction set has") {
  const Forced forced("avx1024");
  CHECK(test::refused([] { (void)instruction_set(); }) ==
        "CHUNKATTN_CPU_ISA = avx1024: expected one of " + running());
}

#endif

TEST_CASE("the option goes before the variable, and an empty variable is none") {
  {
    const Forced forced("avx1024");
    for (const InstructionSet set : detail::cpu::compiled_sets)
      if (detail::cpu::is_supported(set)) CHECK(detail::cpu::resolved(set) == set);
  }
  const Forced forced("");
  InstructionSet best = InstructionSet::automatic;
  for (const InstructionSet set : detail::cpu::compiled_sets)
    if (detail::cpu::is_supported(set)) best = set;
  CHECK(detail::cpu::resolved(InstructionSet::automatic) == best);
}

TEST_CASE_TEMPLATE("every instruction set of a build agrees with the oracle", T, float, half,
                   std::int8_t) {
  test::Random random(1);
  int ran = 0;
  for (const InstructionSet set : detail::cpu::compiled_sets) {
    if (!detail::cpu::is_supported(set)) continue;
    CAPTURE(name_of(set));
    ++ran;
    for (const CpuOptions::Reduce reduce :
         {CpuOptions::Reduce::deterministic, CpuOptions::Reduce::spin_lock,
          CpuOptions::Reduce::batch_invariant}) {
      ChunkAttention<Cpu, 64> attention(2, {.reduce = reduce,
                                            .instruction_set = set,
                                            .tuning = {.min_tasks = 16, .min_product_lines = 1}});
      for (int i = 0; i < test::scaled(10); ++i) {
        test::RandomPlanOptions options;
        options.share = random.pick({test::Share::none, test::Share::some, test::Share::all});
        options.num_sequences = random.uniform(1, random.pick({3, 30}));
        options.chunk_size = random.pick({1, 16, 64});
        options.max_length = random.pick({40, 150, 1000});
        options.max_queries = random.pick({1, 1, 20});
        const test::AttentionCase<T> problem(random, options, 64, random.uniform(1, 2),
                                             random.pick({1, 3, 4, 8}), random.pick({1.0f, 20.0f}));
        test::Answer<> answer(problem);
        attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                      {.lse = answer.lse});
        const Rounding rounding = test::rounding_in<T>(attention);
        CHECK(
            compare_with_reference(problem.reference, std::span<const float>(answer.out), rounding)
                .worst <= 1.0);
        CHECK(test::worst_lse(problem.reference, answer.lse, rounding) <= 1.0);
      }
    }
  }
  CHECK(ran > 0);
}
