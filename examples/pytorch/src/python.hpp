// Conversions that all parts of the binding share: tokens, arrays, and the parts themselves.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "types.hpp"

namespace binding {

namespace nb = nanobind;

/// Throws the library's InvalidArgument, which Python gets as ValueError.
[[noreturn]] void refuse(std::string_view argument, const std::string& value,
                         const std::string& expected);

/// Tokens of a list of integers, or of an array of int32 or int64.
[[nodiscard]] std::vector<Token> tokens_of(nb::handle tokens, const char* argument = "tokens");

/// What insert() and append() take, by the name that Python has for it.
[[nodiscard]] inline const std::vector<Token>& some(const std::vector<Token>& tokens) {
  if (tokens.empty()) refuse("tokens", "[]", "at least one token");
  return tokens;
}

/// How a prompt is inserted, from keywords.
[[nodiscard]] inline chunkattn::InsertOptions insert_options(std::uint64_t tenant,
                                                             std::uint64_t adapter,
                                                             std::size_t public_length,
                                                             std::optional<std::size_t> max_reuse,
                                                             bool compute_last, int priority,
                                                             bool share_pending, bool preempted) {
  return {.name_space = {.tenant = tenant, .adapter = adapter},
          .public_length = public_length,
          .max_reuse = max_reuse.value_or(std::numeric_limits<std::size_t>::max()),
          .compute_last = compute_last,
          .priority = priority,
          .share_pending = share_pending,
          .preempted = preempted};
}

/// Defines what takes a prompt, `More` after it (of the names `args`), and how it is inserted:
/// f(object, tokens, more..., options).
template <class... More, class Object, class F, class... Args>
void define_with_prompt(nb::class_<Object>& type, const char* name, F f, const char* text,
                        const Args&... args) {
  using nb::literals::operator""_a;
  type.def(
      name,
      [f](Object& object, nb::handle tokens, More... more, std::uint64_t tenant,
          std::uint64_t adapter, std::size_t public_length, std::optional<std::size_t> max_reuse,
          bool compute_last, int priority, bool share_pending, bool preempted) {
        return f(object, tokens_of(tokens), more...,
                 insert_options(tenant, adapter, public_length, max_reuse, compute_last, priority,
                                share_pending, preempted));
      },
      "tokens"_a.none(), args..., nb::kw_only(), "tenant"_a = 0, "adapter"_a = 0,
      "public_length"_a = 0, "max_reuse"_a = nb::none(), "compute_last"_a = true, "priority"_a = 0,
      "share_pending"_a = true, "preempted"_a = false, text);
}

/// A NumPy array that owns what `data` holds.
template <class T>
[[nodiscard]] nb::object array_of(std::vector<T> data) {
  auto* const owned = new std::vector<T>(std::move(data));
  const nb::capsule owner(
      owned, [](void* memory) noexcept { delete static_cast<std::vector<T>*>(memory); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

/// A plan, which a kernel may be reading while Python runs.
struct Plan {
  chunkattn::AttentionPlan plan;
  int readers = 0;  // guarded by the GIL
};
/// What build() gave, and of layers with a window their own arrays over the same rows.
struct View {
  Tree::StepView view;
  std::shared_ptr<Plan> plan;
  std::optional<chunkattn::LiveView> of_window{};

  /// What kernels read.
  [[nodiscard]] const chunkattn::LiveView& arrays() const { return of_window ? *of_window : view; }
};
/// A step, until it has ended.
struct Step {
  std::optional<Tree::Step> step;
  [[nodiscard]] Tree::Step& open();
};

void bind_tree(nb::module_& module);
void bind_step(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_windows(nb::module_& module);
void bind_checkpoints(nb::module_& module);
void bind_explain(nb::module_& module);
void bind_attention(nb::module_& module);

}  // namespace binding
