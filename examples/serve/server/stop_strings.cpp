#include "stop_strings.hpp"

#include <algorithm>
#include <cstddef>

namespace serve {

std::string StopStrings::push(std::string_view text, bool may_end) {
  const std::size_t before = held_.size();
  held_ += text;
  // The one that ends first is met first, however the text is cut; of two that end together, the
  // longer. One that ended in a piece before was let pass.
  std::size_t begin = 0, end = std::string::npos;
  for (const std::string& string : strings_) {
    if (!may_end) break;
    const std::size_t passed = before + 1 > string.size() ? before + 1 - string.size() : 0;
    const std::size_t at = held_.find(string, passed);
    if (at == std::string::npos) continue;
    const std::size_t its_end = at + string.size();
    if (its_end < end || (its_end == end && at < begin)) begin = at, end = its_end, found_ = string;
  }
  const bool ends = !found_.empty();
  const std::size_t said = ends ? begin : held_.size() - doubtful();
  std::string out = held_.substr(0, said);
  held_.erase(0, ends ? std::string::npos : said);
  return out;
}

std::size_t StopStrings::doubtful() const {
  std::size_t most = 0;
  for (const std::string& string : strings_)
    for (std::size_t size = std::min(string.size() - 1, held_.size()); size > most; --size)
      if (held_.ends_with(std::string_view(string).substr(0, size))) most = size;
  return most;
}

}  // namespace serve
