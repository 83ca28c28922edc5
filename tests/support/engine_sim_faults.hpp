// Faults around the tree in the engine simulation: memory runs out at any allocation, and
// the allocator of chunks throws, gives none where it said that there are, or answers with a chunk
// that is not free or does not exist.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <unordered_set>

#include "tests/support/engine_sim.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimFaults : public EngineSimBase<Retention, ChunkSize> {
  using Base = EngineSimBase<Retention, ChunkSize>;

 public:
  EngineSimFaults(Choices& choices, const SimOptions& options, Counters& counters)
      : Base(choices, options, counters), starved_(one_in(4)) {}

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::log, Base::memory_, Base::tree_;

  /// Calls the tree while something may fail. False where it did: then nothing has changed, except
  /// cache that had to go.
  template <class F>
  bool attempt(const char* what, const F& call) {
    had_none_ = false;
    const bool lies = one_in(64);
    if (!lies && !starved_) {
      call();
      return true;
    }
    const TreeStats before = tree_->stats();
    const char* fault = failing(lies, call);
    if (fault == nullptr) return true;
    const std::string event = std::string(fault) + ": " + what;
    log(event);
    count(fault);
    count(event);
    const TreeStats now = tree_->stats();
    expect(now.steps == before.steps && now.used_chunks <= before.used_chunks,
           "what failed has not happened");
    check_invariants(*tree_);
    this->check_all_sequences();
    return false;
  }
  /// The same, and again where it failed: it works then.
  template <class F>
  void insist(const char* what, const F& call) {
    if (!attempt(what, call)) call();
  }
  /// In the last attempt the allocator had no chunk, though it had said so.
  bool had_none_ = false;
  std::unordered_set<std::uint64_t> remembered_;  // paths that an unbounded cache must still have
  /// Of these, those whose last token has a value in each column.
  std::array<std::unordered_set<std::uint64_t>, 2> remembered_values_;
  /// Cache had to go.
  void forget_cache() {
    remembered_.clear();
    for (auto& values : remembered_values_) values.clear();
  }

 private:
  /// Calls it with a fault to come; which one came, if it failed.
  template <class F>
  const char* failing(bool lies, const F& call) {
    struct Disarm {
      ShadowMemory& memory;
      ~Disarm() {
        heap.fail_in = -1;
        memory.lie = Lie::none;
      }
    } disarm{memory_};
    constexpr Lie kinds[] = {Lie::in_use,   Lie::in_use, Lie::too_large,
                             Lie::negative, Lie::spent,  Lie::breaks};
    const Lie kind = kinds[below(6)];
    const std::uint64_t told = memory_.lies;
    memory_.lie_at = below(1000);
    if (lies)
      memory_.lie = kind;
    else
      heap.fail_in = static_cast<std::int64_t>(below(3));
    const auto lied = [&] { return memory_.lies > told; };
    try {
      call();
    } catch (const std::bad_alloc&) {
      expect(!lies, "memory did not run out");
      return "memory ran out";
    } catch (const BrokenAllocator&) {
      return "allocator threw";
    } catch (const InvalidArgument& error) {
      if (!lied() || kind == Lie::spent) throw;
      expect(std::string(error.what()).starts_with("allocator.allocate() = "),
             "an error names what the allocator answered");
      return "allocator lied";
    }
    expect(!lied() || kind == Lie::spent, "what is no free chunk is refused");
    had_none_ = lied();
    if (had_none_) {
      forget_cache();
      count("allocator had none after all");
    }
    return nullptr;
  }

  bool starved_;  // in this tree's life memory is short
};

}  // namespace test
