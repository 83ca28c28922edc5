// JSON out of files: what is wrong with it is a FileError that names the file.
#pragma once

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "../../support/json_text.hpp"
#include "mapped_file.hpp"

namespace serve {

/// All of a file. \throws FileError
[[nodiscard]] inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw FileError(path + ": cannot be opened");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// use(json) of the value that a text is. \throws FileError that begins with `where` for a text
/// that is no JSON, is nested too deeply or has not what `use` asks the library for
template <class Use>
auto with_json(const std::string& where, std::string_view text, const Use& use) {
  try {
    return use(examples::read_json(text));
  } catch (const examples::JsonError& error) {
    throw FileError(where + ": JSON: " + error.what());
  } catch (const nlohmann::json::exception& error) {
    throw FileError(where + ": JSON: " + examples::message_of(error));
  }
}

}  // namespace serve
