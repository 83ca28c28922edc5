// Plans, and their arrays for NumPy.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chunkattn/plan_view.hpp>
#include <cstring>

#include "python.hpp"

namespace binding {
namespace {

using nb::literals::operator""_a;
using chunkattn::Piece;
using chunkattn::PlanView;

const PlanView& current(const View& view) {
  if (!view.view.is_current())
    refuse("view", "out of date", "that of the plan's last build(), before its step has ended");
  return view.arrays();
}

/// A structured array: a snapshot, which stays as it is when the plan is built again.
template <std::size_t N, class Record>
nb::object records(const Record* from, std::int32_t count,
                   const std::array<const char*, N>& fields) {
  static_assert(sizeof(Record) == N * sizeof(std::int32_t));
  std::vector<std::int32_t> numbers(N * static_cast<std::size_t>(count));
  if (count > 0) std::memcpy(numbers.data(), from, numbers.size() * sizeof(std::int32_t));
  nb::list type;
  for (const char* field : fields) type.append(nb::make_tuple(field, "i4"));
  return array_of(std::move(numbers))
      .attr("view")(nb::module_::import_("numpy").attr("dtype")(type));
}

nb::object numbers(const std::int32_t* from, std::int32_t count) {
  return array_of(std::vector<std::int32_t>(from, from + count));
}

View build(const std::shared_ptr<Plan>& plan, Step& step) {
  if (plan->readers > 0) refuse("plan", "in use", "one that no kernel is reading");
  return {plan->plan.build(step.open()), plan};
}

void bind_arrays(nb::class_<View>& view) {
  view.def_prop_ro(
          "segments",
          [](const View& v) {
            const PlanView& p = current(v);
            return records<8>(p.segments, p.num_segments,
                              {"row_begin", "row_end", "piece_begin", "num_pieces", "position",
                               "length", "parent", "num_sequences"});
          },
          "Ranges of path positions that the same rows see, parents before children.")
      .def_prop_ro(
          "pieces",
          [](const View& v) {
            const PlanView& p = current(v);
            return records<4>(p.pieces, p.num_pieces, {"chunk", "begin", "length", "position"});
          },
          "Parts of segments, each inside one chunk.")
      .def_prop_ro(
          "writes",
          [](const View& v) {
            const PlanView& p = current(v);
            return records<2>(p.writes, p.num_rows, {"chunk", "offset"});
          },
          "Where the K/V of each row goes, in the caller's order; chunk -1: nowhere.")
      .def_prop_ro(
          "copies",
          [](const View& v) {
            const PlanView& p = current(v);
            return records<5>(
                p.copies, p.num_copies,
                {"source_chunk", "source_begin", "target_chunk", "target_begin", "length"});
          },
          "K/V rows to copy before anything is written.")
      .def_prop_ro(
          "row_token", [](const View& v) { return numbers(current(v).row_token, v.view.num_rows); },
          "The plan's rows, as indices in the caller's order.")
      .def_prop_ro(
          "row_kv_len",
          [](const View& v) { return numbers(current(v).row_kv_len, v.view.num_rows); },
          "A row sees the path positions below this.")
      .def_prop_ro(
          "row_segment",
          [](const View& v) { return numbers(current(v).row_segment, v.view.num_rows); },
          "The last segment of the row's path.");
}

}  // namespace

void bind_plan(nb::module_& module) {
  nb::class_<View> view(module, "View",
                        "The plan of one step: what the model computes, and arrays for kernels.");
  view.def("__bool__", [](const View& v) { return static_cast<bool>(v.view); })
      .def_prop_ro(
          "is_current", [](const View& v) { return v.view.is_current(); },
          "False once its step has ended, or its plan has built another.")
      .def_prop_ro(
          "num_rows", [](const View& v) { return v.view.num_rows; }, "Query tokens.")
      .def_prop_ro(
          "tokens", [](const View& v) { return array_of(v.view.tokens()); },
          "The tokens to compute, an array of int32: the model's input ids.")
      .def(
          "tokens_or",
          [](const View& v, Token placeholder) { return array_of(v.view.tokens(placeholder)); },
          "placeholder"_a, "The same where some are not known on the host yet.")
      .def_prop_ro(
          "positions", [](const View& v) { return array_of(v.view.positions()); },
          "Their positions, an array of int32: for the rotary embedding.");
  bind_arrays(view);
  nb::class_<Plan>(module, "Plan", "Makes the arrays of steps. Keep one over many steps.")
      .def(nb::init<>())
      .def("build", &build, "step"_a,
           "The plan of an open step. Earlier views of this plan go out of date.")
      .def_prop_ro(
          "num_rebuilds", [](const Plan& p) { return p.plan.num_rebuilds(); },
          "How often build() has rebuilt the arrays.");
}

}  // namespace binding
