// Steps: open, in flight, finished; their rows.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python.hpp"

namespace binding {

Tree::Step& Step::open() {
  if (!step) refuse("step", "ended", "one that is open");
  return *step;
}

namespace {

using nb::literals::operator""_a;
using chunkattn::AddResult;
using chunkattn::ScheduledSequence;

struct InFlight {
  std::optional<Tree::InFlight> step;
};
struct Finished {
  std::optional<Tree::Finished> step;
  Tree::Finished& open() {
    if (!step) refuse("finished", "dropped", "one that was not dropped");
    return *step;
  }
};

template <class T>
T taken(std::optional<T>& from, const char* name) {
  if (!from) refuse(name, "ended", "one that has not ended");
  T value = std::move(*from);
  from.reset();
  return value;
}

const char* name_of(AddResult::Reason reason) {
  switch (reason) {
    case AddResult::Reason::none:
      return "added";
    case AddResult::Reason::waits_for_sequence:
      return "waits_for_sequence";
    case AddResult::Reason::waits_for_step:
      return "waits_for_step";
    case AddResult::Reason::out_of_chunks:
      return "out_of_chunks";
    case AddResult::Reason::nothing_to_compute:
      return "nothing_to_compute";
  }
  return "";
}

AddResult add(Step& step, Tree::Sequence& sequence, std::optional<std::size_t> max_tokens,
              nb::object drafts, std::size_t num_drafts, nb::object parents) {
  const std::vector<Token> tokens =
      drafts.is_none() ? std::vector<Token>{} : tokens_of(drafts, "drafts");
  const std::vector<std::int32_t> tree =
      parents.is_none() ? std::vector<std::int32_t>{} : tokens_of(parents, "parents");
  return step.open().add(sequence, max_tokens.value_or(std::numeric_limits<std::size_t>::max()),
                         {.tokens = tokens, .count = num_drafts, .parents = tree});
}

AddResult add_all(Step& step, const std::vector<Tree::Sequence*>& sequences,
                  std::optional<std::size_t> max_tokens) {
  return step.open().add(std::span<Tree::Sequence* const>(sequences),
                         max_tokens.value_or(std::numeric_limits<std::size_t>::max()));
}

void bind_results(nb::module_& module) {
  nb::class_<ScheduledSequence>(module, "ScheduledSequence", "The rows of one sequence in a step.")
      .def_prop_ro(
          "sequence",
          [](const ScheduledSequence& r) { return static_cast<std::uint64_t>(r.sequence); },
          "Sequence.id")
      .def_ro("index", &ScheduledSequence::index, "Sequences that were added before it.")
      .def_ro("position", &ScheduledSequence::position,
              "Position of the first row in its sequence.")
      .def_ro("first_row", &ScheduledSequence::first_row, "Its index in q, k, v and out.")
      .def_ro("num_rows", &ScheduledSequence::num_rows, "Drafts included.")
      .def_ro("num_drafts", &ScheduledSequence::num_drafts, "The last of these rows.")
      .def_ro("has_output", &ScheduledSequence::has_output, "Whether there is something to sample.")
      .def_prop_ro("output_row", &ScheduledSequence::output_row,
                   "Whose logits give the first output.")
      .def("__repr__", [](const ScheduledSequence& r) {
        return "<chunkattn.ScheduledSequence " + std::to_string(r.first_row) + " to " +
               std::to_string(r.first_row + r.num_rows - 1) + ", positions from " +
               std::to_string(r.position) + (r.has_output ? ", with an output>" : ">");
      });
  nb::class_<AddResult>(module, "AddResult", "Whether sequences were added to a step, or why not.")
      .def("__bool__", [](const AddResult& r) { return static_cast<bool>(r); })
      .def_prop_ro(
          "reason", [](const AddResult& r) { return name_of(r.reason()); },
          "'added', 'waits_for_sequence', 'waits_for_step', 'out_of_chunks' or "
          "'nothing_to_compute'.")
      .def_prop_ro(
          "waits_for", [](const AddResult& r) { return static_cast<std::uint64_t>(r.waits_for()); },
          "With 'waits_for_sequence': its id.")
      .def_prop_ro("step", &AddResult::step, "With 'waits_for_step': its number.")
      .def_prop_ro("blocked_index", &AddResult::blocked_index,
                   "Of many sequences: the first that could not be added.")
      .def_prop_ro(
          "row", [](const AddResult& r) -> ScheduledSequence { return r.row(); },
          "The rows of the sequence that was added.");
}

}  // namespace

void bind_step(nb::module_& module) {
  bind_results(module);
  nb::class_<Finished>(module, "Finished", "A step that has run: commit what was sampled.")
      .def_prop_ro("number", [](Finished& f) { return f.open().number(); })
      .def(
          "rows",
          [](Finished& f) {
            std::vector<ScheduledSequence> rows;
            for (const ScheduledSequence& row : f.open().rows()) rows.push_back(row);
            return rows;
          },
          "The rows to sample from, in the order of add().")
      .def(
          "commit",
          [](Finished& f, const ScheduledSequence& row, nb::handle outputs,
             std::optional<std::int32_t> leaf) {
            Token one = 0;
            if (nb::try_cast(outputs, one, true)) return f.open().commit(row, one, leaf);
            const std::vector<Token> many = tokens_of(outputs, "outputs");
            f.open().commit(row, std::span<const Token>(many), leaf);
          },
          "row"_a, "outputs"_a, "leaf"_a = nb::none(),
          "Commits a token; with drafts the accepted ones, then one more.")
      .def(
          "commit_all",
          [](Finished& f, nb::handle outputs) { f.open().commit(tokens_of(outputs, "outputs")); },
          "outputs"_a, "Commits one token for each of rows().")
      .def("drop", [](Finished& f) { f.step.reset(); }, "Discards what was not committed.");
  nb::class_<InFlight>(module, "InFlight", "A step that is queued on a device.")
      .def(
          "finished", [](InFlight& s) { return Finished{taken(s.step, "step").finish()}; },
          "Says that the device has run it.");
  nb::class_<Step>(module, "Step", "An open step. Deleting it cancels it.")
      .def("add", &add, "sequence"_a, "max_tokens"_a = nb::none(), nb::kw_only(),
           "drafts"_a = nb::none(), "num_drafts"_a = 0, "parents"_a = nb::none(),
           "Adds the next tokens of a sequence that are not computed, and drafts after them.")
      .def("add_all", &add_all, "sequences"_a, "max_tokens"_a = nb::none(),
           "Adds the next tokens of many sequences: of all or of none.")
      .def_prop_ro("num_rows", [](Step& s) { return s.open().num_rows(); })
      .def_prop_ro("num_sequences", [](Step& s) { return s.open().num_sequences(); })
      .def_prop_ro("number", [](Step& s) { return s.open().number(); })
      .def(
          "cancel", [](Step& s) { s.step.reset(); }, "Its tokens are still to be computed.")
      .def(
          "submitted",
          [](Step& s) {
            InFlight next{std::move(s.open()).submit()};
            s.step.reset();
            return next;
          },
          "Says that the kernels are queued.")
      .def(
          "finished",
          [](Step& s) {
            Finished next{std::move(s.open()).finish()};
            s.step.reset();
            return next;
          },
          "Says that the kernels have run.");
}

}  // namespace binding
