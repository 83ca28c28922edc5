// JSON that is valid and that no stack has room for: 100,000 lists, or objects, in one another.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace test {

inline std::vector<std::string> nested_json() {
  constexpr std::size_t levels = 100'000;
  std::string objects;
  for (std::size_t i = 0; i < levels; ++i) objects += "{\"a\":";
  return {std::string(levels, '[') + std::string(levels, ']'),
          objects + "0" + std::string(levels, '}')};
}

}  // namespace test
