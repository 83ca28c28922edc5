// The module chunkattn._core: its errors, and its parts in their order.
#include <nanobind/stl/string.h>

#include <chunkattn/attention_options.hpp>
#include <chunkattn/error.hpp>
#include <exception>

#include "python.hpp"

namespace binding {

void refuse(std::string_view argument, const std::string& value, const std::string& expected) {
  throw chunkattn::InvalidArgument(std::string(argument) + " = " + value + ": expected " +
                                   expected);
}

namespace {

template <class T>
std::vector<Token> narrowed(const nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>& array,
                            const char* argument) {
  std::vector<Token> all(array.shape(0));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const T token = array(i);
    if (static_cast<Token>(token) != token)
      refuse(argument, std::to_string(token), "tokens of 32 bits");
    all[i] = static_cast<Token>(token);
  }
  return all;
}

}  // namespace

std::vector<Token> tokens_of(nb::handle tokens, const char* argument) {
  if (nb::ndarray<const std::int64_t, nb::ndim<1>, nb::device::cpu> wide;
      nb::try_cast(tokens, wide, false))
    return narrowed(wide, argument);
  if (nb::ndarray<const Token, nb::ndim<1>, nb::device::cpu> array;
      nb::try_cast(tokens, array, false))
    return narrowed(array, argument);
  if (!nb::isinstance<nb::sequence>(tokens) || nb::isinstance<nb::str>(tokens))
    refuse(argument, nb::cast<std::string>(nb::str(tokens.type())),
           "a list of integers, or an array of int32 or int64 with one dimension");
  std::vector<Token> all;
  for (const nb::handle token : tokens) {
    if (Token number; nb::try_cast(token, number, true))
      all.push_back(number);
    else
      refuse(argument, nb::cast<std::string>(nb::repr(token)), "integers of 32 bits");
  }
  return all;
}

}  // namespace binding

NB_MODULE(_core, module) {
  namespace nb = nanobind;
  using namespace binding;
  nb::set_leak_warnings(false);  // the interpreter's end leaves what globals of modules hold
  module.doc() = "The library chunkattn: a prefix tree of prompts, and attention over it.";
  // Called from the last one to the first: what is no other is a RuntimeError.
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const chunkattn::InvalidArgument& bad) {
      PyErr_SetString(PyExc_ValueError, bad.what());
    }
  });
  nb::exception<chunkattn::OutOfChunks>(module, "OutOfChunks", PyExc_RuntimeError).doc() =
      "The budget of chunks is spent: a normal event under load.";
  module.def("instruction_set", &chunkattn::describe_instruction_set,
             "The instruction set that kernels use, and what was compiled.");
  bind_tree(module);
  bind_step(module);
  bind_plan(module);
  bind_windows(module);
  bind_checkpoints(module);
  bind_explain(module);
  bind_attention(module);
}
