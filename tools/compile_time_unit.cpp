// A unit of the standard library alone, the yardstick of compile_time.sh: templates to instantiate
// and loops to optimise, as the library's.
#include <algorithm>
#include <functional>
#include <map>
#include <regex>
#include <string>
#include <vector>

std::map<std::string, std::vector<double>> parse(const std::string& text) {
  static const std::regex line("([a-z_]+)\\s*=\\s*([-+0-9.e, ]+)");
  static const std::regex number("[-+0-9.e]+");
  std::map<std::string, std::vector<double>> values;
  for (std::sregex_iterator match(text.begin(), text.end(), line), end; match != end; ++match) {
    const std::string list = (*match)[2];
    std::vector<double>& found = values[(*match)[1]];
    for (std::sregex_iterator one(list.begin(), list.end(), number); one != end; ++one)
      found.push_back(std::stod(one->str()));
    std::sort(found.begin(), found.end(), std::greater<>());
  }
  return values;
}
