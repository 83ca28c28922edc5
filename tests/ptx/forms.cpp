#include "ptx/forms.hpp"

#include <unordered_map>

namespace ptxrun {
namespace {

const Forms& all_forms() {
  static const Forms made = [] {
    Forms forms;
    add_integer_forms(forms);
    add_float_forms(forms);
    add_conversions(forms);
    add_memory_forms(forms);
    add_warp_forms(forms);
    for (std::size_t n = 0; n < forms.size(); ++n) forms[n].number = static_cast<int>(n);
    return forms;
  }();
  return made;
}

}  // namespace

const Form* find_form(const std::string& name, char width) {
  static const auto index = [] {
    std::unordered_map<std::string, const Form*> made;
    for (const Form& form : all_forms()) made[form.name] = &form;
    return made;
  }();
  auto found = index.find(name + "/" + width);
  if (found == index.end()) found = index.find(name);
  return found != index.end() ? found->second : nullptr;
}

int num_forms() {
  return static_cast<int>(all_forms().size());
}

}  // namespace ptxrun
