// Checkpoints: states of a model's recurrent layers, which are any objects of Python's.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <chunkattn/cache/checkpoints.hpp>

#include "python.hpp"

namespace binding {
namespace {

using nb::literals::operator""_a;
using Sequence = Tree::Sequence;

/// Objects that a tree has let go. The end of one may run any of Python's code, so it waits until
/// no call of the tree runs: for the next call of Checkpoints. Guarded by the GIL.
struct Ended {
  std::vector<nb::object> objects;
  std::size_t kept = 0;  // for all of which there is room

  void release() {
    std::vector<nb::object> now;
    now.reserve(kept);
    now.swap(objects);
  }
};

/// An object of Python's as a state.
std::shared_ptr<const nb::object> state_of(nb::object object, std::shared_ptr<Ended> ended) {
  ended->objects.reserve(ended->objects.size() + ended->kept + 1);
  auto* const mine = new nb::object(std::move(object));
  ++ended->kept;
  return {mine, [ended = std::move(ended)](nb::object* state) {
            --ended->kept;
            ended->objects.push_back(std::move(*state));
            delete state;
          }};
}

/// With the tree, which Python keeps.
struct States {
  std::shared_ptr<Ended> ended = std::make_shared<Ended>();
  chunkattn::Checkpoints<Tree> checkpoints;

  States(Tree& tree, chunkattn::Checkpoints<Tree>::Options options) : checkpoints(tree, options) {}

  std::pair<std::size_t, nb::object> resume(Sequence& sequence) {
    ended->release();
    const auto [position, state] = checkpoints.resume(sequence);
    return {position, state ? *static_cast<const nb::object*>(state.get()) : nb::none()};
  }
  bool save(const Sequence& sequence, std::size_t position, nb::object state) {
    if (state.is_none()) refuse("state", "None", "what resume() is to return");
    const bool kept = checkpoints.save(sequence, position, state_of(std::move(state), ended));
    ended->release();
    return kept;
  }
};

nb::dict stats_of(const States& states) {
  states.ended->release();
  nb::dict all;
  const auto s = states.checkpoints.stats();
  all["count"] = s.count, all["evicted"] = s.evicted;
  return all;
}

}  // namespace

void bind_checkpoints(nb::module_& module) {
  nb::class_<States> states(
      module, "Checkpoints",
      "States of a model's recurrent layers, kept for prompts that begin with the same tokens. A "
      "state is any object; what the tree no longer has is let go by the next call.\n\n"
      "max_count: how many are kept; max_per_path: of these, on the path of any one prompt.");
  states
      .def(
          "__init__",
          [](States* memory, Tree& tree, std::size_t max_count, std::int32_t max_per_path) {
            new (memory) States(tree, {.max_count = max_count, .max_per_path = max_per_path});
          },
          "tree"_a, "max_count"_a, nb::kw_only(), "max_per_path"_a = 8, nb::keep_alive<1, 2>())
      .def("resume", &States::resume, "sequence"_a,
           "Has a sequence computed from the nearest state on: (position, state), or (0, None). "
           "Call it when num_pending is 0, and whenever the sequence's own state is lost.")
      .def(
          "next",
          [](const States& s, const Sequence& sequence) -> std::optional<std::size_t> {
            const std::size_t position = s.checkpoints.next(sequence);
            if (position == Sequence::whole) return std::nullopt;
            return position;
          },
          "sequence"_a, "The next position at which a state is wanted, or None.")
      .def("save", &States::save, "sequence"_a, "position"_a, "state"_a.none(),
           "Keeps the state after the first `position` tokens; False where there is one.")
      .def("stats", &stats_of, "How many there are, and how many were evicted for others.");
  define_with_prompt(
      states, "find",
      [](const States& s, const std::vector<Token>& tokens, const chunkattn::InsertOptions& o) {
        return s.checkpoints.find(tokens, o);
      },
      "Where a prompt would be resumed.");
}

}  // namespace binding
