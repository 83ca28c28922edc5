// WindowedLayers: the layers of a model that have one sliding window; WindowedGroups: all of these.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python.hpp"

namespace binding {
namespace {

using nb::literals::operator""_a;

nb::dict stats_of(const WindowedLayers& layers) {
  const WindowedLayers::Stats s = layers.stats();
  nb::dict all;
  all["used_chunks"] = s.used_chunks, all["cached_chunks"] = s.cached_chunks;
  all["peak_used_chunks"] = s.peak_used_chunks, all["evicted_chunks"] = s.evicted_chunks;
  all["recomputed_tokens"] = s.recomputed_tokens;
  return all;
}

View view(WindowedLayers& layers, const View& of_tree) {
  if (of_tree.of_window) refuse("view", "of layers with a window", "what Plan.build() gave");
  if (of_tree.plan && of_tree.plan->readers > 0)
    refuse("plan", "in use", "one that no kernel is reading");
  return {of_tree.view, of_tree.plan, layers.view(of_tree.view)};
}

/// With the tree, which Python keeps.
struct Groups {
  Tree* tree;
  chunkattn::WindowedGroups<Tree> groups;

  Groups(Tree& of_groups, const std::vector<WindowedLayers::Options>& options)
      : tree(&of_groups), groups(of_groups, options) {}
};

void bind_groups(nb::module_& module) {
  using Sequence = Tree::Sequence;
  using Tokens = std::vector<Token>;
  using Options = chunkattn::InsertOptions;
  nb::class_<Groups> groups(
      module, "WindowedGroups",
      "The groups of layers with a window that a model has, perhaps none, resumed and admitted as "
      "one.\n\nwindows: of each window, the most chunks of its group.");
  groups
      .def(
          "__init__",
          [](Groups* memory, Tree& tree, const nb::dict& windows) {
            std::vector<WindowedLayers::Options> options;
            for (const auto& [window, max_chunks] : windows) {
              WindowedLayers::Options& of_group = options.emplace_back();
              if (!nb::try_cast(window, of_group.window) ||
                  !nb::try_cast(max_chunks, of_group.max_chunks))
                refuse("windows", nb::cast<std::string>(nb::repr(windows)),
                       "of each window, the most chunks of its group");
            }
            new (memory) Groups(tree, options);
          },
          "tree"_a, "windows"_a, nb::keep_alive<1, 2>())
      .def("__len__", [](const Groups& g) { return g.groups.size(); })
      .def(
          "__getitem__",
          [](const Groups& g, std::size_t index) -> WindowedLayers& {
            if (index >= g.groups.size()) throw nb::index_error("there is no such group");
            return g.groups[index];
          },
          "index"_a, nb::rv_policy::reference_internal, "One of them, in their order.")
      .def(
          "is_ready", [](const Groups& g, const Sequence& s) { return g.groups.is_ready(s); },
          "sequence"_a, "WindowedLayers.is_ready() of all.")
      .def(
          "resume", [](Groups& g, Sequence& s) { return g.groups.resume(s); }, "sequence"_a,
          "WindowedLayers.resume() of all: from the last position on before which all have the "
          "window; returns it. Raises OutOfChunks with nothing changed.")
      .def(
          "has_room", [](const Groups& g, Step& step) { return g.groups.has_room(step.open()); },
          "step"_a, "Whether view() of each has the chunks that an open step takes.");
  define_with_prompt<std::size_t>(
      groups, "try_insert",
      [](Groups& g, const Tokens& tokens, std::size_t max_tokens, const Options& options) {
        return g.groups.try_insert(*g.tree, some(tokens), max_tokens, options);
      },
      "Tree.try_insert() and resume(). None where the tree lacks chunks, or a group those that "
      "chunks_needed() says. If num_pending is not 0, resume() comes later.",
      "max_tokens"_a);
  define_with_prompt<std::size_t>(
      groups, "chunks_needed",
      [](Groups& g, const Tokens& tokens, std::size_t max_tokens, const Options& options) {
        return g.groups.chunks_needed(tokens, max_tokens, options);
      },
      "Of each group, the most chunks that a prompt takes until it is computed, in steps of at "
      "most max_tokens of its rows.",
      "max_tokens"_a);
  define_with_prompt(
      groups, "find",
      [](Groups& g, const Tokens& tokens, const Options& options) {
        return g.groups.find(tokens, options);
      },
      "Where a prompt would be resumed.");
}

}  // namespace

void bind_windows(nb::module_& module) {
  using Sequence = Tree::Sequence;
  nb::class_<WindowedLayers>(
      module, "WindowedLayers",
      "The layers of a model that have one sliding window, with chunks of their own beside those "
      "of a tree: what the window of a sequence's next token does not touch is given back, but for "
      "what is kept where prompts part or ended.\n\n"
      "window: keys that a row sees, its own included. max_chunks: of the group. "
      "max_cached_chunks: of these, those of no live sequence; by default all that these leave.")
      .def(
          "__init__",
          [](WindowedLayers* memory, Tree& tree, std::int32_t window, std::size_t max_chunks,
             std::optional<std::size_t> max_cached_chunks) {
            new (memory) WindowedLayers(tree, {.window = window,
                                               .max_chunks = max_chunks,
                                               .max_cached_chunks = max_cached_chunks});
          },
          "tree"_a, "window"_a, "max_chunks"_a, nb::kw_only(), "max_cached_chunks"_a = nb::none(),
          nb::keep_alive<1, 2>())
      .def_prop_ro("window", [](const WindowedLayers& w) { return w.options().window; })
      .def_prop_ro("max_chunks", [](const WindowedLayers& w) { return w.options().max_chunks; })
      .def_prop_ro("max_cached_chunks",
                   [](const WindowedLayers& w) { return w.options().max_cached_chunks; })
      .def_prop_ro("chunks_available", &WindowedLayers::chunks_available, "Chunks free or cached.")
      .def("is_ready", &WindowedLayers::is_ready, "sequence"_a,
           "Whether it can be added to a step as it stands; if not, resume() comes first.")
      .def(
          "window_end",
          [](const WindowedLayers& w, const Sequence& s, std::optional<std::size_t> limit) {
            return w.window_end(s, limit.value_or(Sequence::whole));
          },
          "sequence"_a, "limit"_a = nb::none(),
          "The last position up to a limit before which the window is there.")
      .def(
          "resume",
          [](WindowedLayers& w, Sequence& s, std::optional<std::size_t> position) {
            return position ? w.resume(s, *position) : w.resume(s);
          },
          "sequence"_a, "position"_a = nb::none(),
          "Has a sequence computed from the last position on whose window is there, or from "
          "another that window_end() returned; returns it. Call it when num_pending is 0. Raises "
          "OutOfChunks.")
      .def("view", &view, "view"_a, nb::keep_alive<0, 1>(),
           "The plan of these layers, for what Plan.build() gave: once for each, before write() "
           "and run(). Raises OutOfChunks; cancel the step then.")
      .def(
          "chunks_needed",
          [](const WindowedLayers& w, Step& step) { return w.chunks_needed(step.open()); },
          "step"_a, "The most chunks that view() takes for an open step.")
      .def("stats", &stats_of, "Counts since construction, and the present state.")
      .def("__repr__", [](const WindowedLayers& w) {
        const WindowedLayers::Stats s = w.stats();
        return "<chunkattn.WindowedLayers: window " + std::to_string(w.options().window) + ", " +
               std::to_string(s.used_chunks) + " of at most " +
               std::to_string(w.options().max_chunks) + " chunks, " +
               std::to_string(s.cached_chunks) + " of them only cached>";
      });
  bind_groups(module);
}

}  // namespace binding
