// Text for a person, 80 columns wide: tables with columns as wide as their widest cell and numbers
// to the right, paragraphs, colours.
#pragma once

#include <fmt/color.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terminal.hpp"

namespace examples {

inline std::string styled(fmt::text_style style, std::string_view text) {
  return use_colours() ? fmt::format(style, "{}", text) : std::string(text);
}
inline std::string bold(std::string_view text) {
  return styled(fmt::emphasis::bold, text);
}
inline std::string dim(std::string_view text) {
  return styled(fmt::emphasis::faint, text);
}
inline std::string green(std::string_view text) {
  return styled(fmt::emphasis::bold | fmt::fg(fmt::terminal_color::green), text);
}
inline std::string red(std::string_view text) {
  return styled(fmt::emphasis::bold | fmt::fg(fmt::terminal_color::red), text);
}

/// Columns that UTF-8 text takes: code points, without terminal escapes.
inline std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && text[i] != 'm') ++i;
      continue;
    }
    if ((static_cast<unsigned char>(text[i]) & 0xc0u) != 0x80u) ++width;
  }
  return width;
}

/// The first `columns` code points, with "…" in place of what was cut.
inline std::string clipped(std::string_view text, std::size_t columns) {
  if (display_width(text) <= columns) return std::string(text);
  std::size_t end = 0, width = 0;
  while (end < text.size()) {
    if ((static_cast<unsigned char>(text[end]) & 0xc0u) != 0x80u && ++width == columns) break;
    ++end;
  }
  return std::string(text.substr(0, end)) + "…";
}

inline void section(std::string_view title) {
  fmt::print("\n{}\n", bold(title));
}

/// Words in lines of at most 80 columns, or the terminal's if those are fewer. The first line
/// begins at column `indent`, where the others are made to begin.
inline std::string wrapped(std::string_view text, std::size_t indent) {
  const std::size_t most = std::min<std::size_t>(80, terminal_width());
  std::string out;
  std::size_t column = indent;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string_view word = text.substr(at, end - at);
    const std::size_t width = display_width(word);
    if (!out.empty() && column + 1 + width > most) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    } else if (!out.empty()) {
      out += ' ';
      ++column;
    }
    out += word;
    column += width;
    at = end + 1;
  }
  return out;
}

inline void paragraph(std::string_view text) {
  fmt::print("  {}\n", wrapped(text, 2));
}

/// "59.4 MiB"
inline std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : bytes < 100 ? 1 : 0, units[unit]);
}

/// "1,832"
inline std::string grouped(std::size_t value) {
  std::string digits = std::to_string(value), out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i != 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

class Table {
 public:
  /// Headers that begin with '<' align their column to the left.
  explicit Table(std::vector<std::string> headers) : headers_(std::move(headers)) {
    for (std::string& header : headers_) {
      left_.push_back(header.starts_with('<'));
      if (left_.back()) header.erase(0, 1);
    }
  }

  void row(std::vector<std::string> cells) {
    cells.resize(headers_.size());
    rows_.push_back(std::move(cells));
  }

  void print(int indent = 2) const {
    std::vector<std::size_t> widths(headers_.size());
    for (std::size_t c = 0; c < widths.size(); ++c) {
      widths[c] = display_width(headers_[c]);
      for (const auto& cells : rows_) widths[c] = std::max(widths[c], display_width(cells[c]));
    }
    const std::string margin(static_cast<std::size_t>(indent), ' ');
    std::size_t total = 2 * (widths.size() - 1);
    for (std::size_t width : widths) total += width;
    std::string rule;
    for (std::size_t i = 0; i < total; ++i) rule += "─";
    fmt::print("{}{}\n{}{}\n", margin, line(headers_, widths), margin, dim(rule));
    for (const auto& cells : rows_) fmt::print("{}{}\n", margin, line(cells, widths));
  }

 private:
  [[nodiscard]] std::string line(const std::vector<std::string>& cells,
                                 const std::vector<std::size_t>& widths) const {
    std::string out;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - display_width(cells[c]), ' ');
      if (c != 0) out += "  ";
      out += left_[c] ? cells[c] + padding : padding + cells[c];
    }
    while (!out.empty() && out.back() == ' ') out.pop_back();
    return out;
  }

  std::vector<std::string> headers_;
  std::vector<bool> left_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace examples
