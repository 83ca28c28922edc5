// Draws the prefix tree of a step: who shares which chunks. It reads the plan alone, which has the
// tree's structure in depth-first order.
#pragma once

#include <fmt/format.h>

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "../support/table.hpp"

namespace shared_prompt {

class TreePicture {
 public:
  /// \param text   text(row, begin, end): what the path positions [begin, end) of a row say
  /// \param title  title(row): the name of the sequence that the row belongs to
  TreePicture(const chunkattn::PlanView& plan, std::function<std::string(int, int, int)> text,
              std::function<std::string(int)> title)
      : plan_(plan),
        text_(std::move(text)),
        title_(std::move(title)),
        children_(static_cast<std::size_t>(plan.num_segments)),
        ends_(static_cast<std::size_t>(plan.num_segments)) {
    for (std::int32_t s = 0; s < plan.num_segments; ++s) {
      const std::int32_t parent = plan.segments[s].parent;
      if (parent >= 0)
        children_[static_cast<std::size_t>(parent)].push_back(s);
      else
        roots_.push_back(s);
    }
    for (std::int32_t row = 0; row < plan.num_rows; ++row)
      ends_[static_cast<std::size_t>(plan.row_segment[row])].push_back(row);
  }

  void print() const {
    fmt::print("  {}\n", examples::dim(fmt::format("{:<{}}  {:>6}  {:>6}  {:>9}", "", name_width,
                                                   "tokens", "chunks", "sequences")));
    for (const std::int32_t root : roots_) draw(root, "", "");
  }

 private:
  static constexpr std::size_t name_width = 40, bar_width = 10;  // 80 columns in all

  void draw(std::int32_t index, const std::string& branch, const std::string& below) const {
    const chunkattn::PlanView::Segment& segment = plan_.segments[index];
    const auto& children = children_[static_cast<std::size_t>(index)];
    const auto& ends = ends_[static_cast<std::size_t>(index)];
    const bool leaf = children.empty() && ends.size() == 1;
    // What a segment holds: of slots reserved for later, only those that are in use.
    std::int32_t tokens = 0;
    std::set<chunkattn::ChunkIndex> chunks;
    const std::int32_t kv_len = longest_row(segment);
    for (std::int32_t p = 0; p < segment.num_pieces; ++p) {
      const chunkattn::Piece& piece = plan_.pieces[segment.piece_begin + p];
      const std::int32_t seen = chunkattn::visible_length(piece, kv_len);
      if (seen == 0) continue;
      tokens += seen;
      chunks.insert(piece.chunk);
    }
    const std::string name =
        leaf ? title_(ends[0])
             : quoted(text_(segment.row_begin, segment.position, segment.position + tokens));
    line(branch + (leaf ? "" : "● "), name, leaf, tokens, chunks.size(), segment.num_sequences);
    const std::size_t entries = children.size() + (leaf ? 0 : ends.size());
    std::size_t entry = 0;
    const auto fork = [&](bool is_last) { return below + (is_last ? "└─ " : "├─ "); };
    if (!leaf)
      for (const std::int32_t row : ends)
        line(fork(++entry == entries), title_(row), true, 0, 0, 1);
    for (const std::int32_t child : children) {
      const bool is_last = ++entry == entries;
      draw(child, fork(is_last), below + (is_last ? "   " : "│  "));
    }
  }

  [[nodiscard]] std::int32_t longest_row(const chunkattn::PlanView::Segment& segment) const {
    std::int32_t longest = 0;
    for (std::int32_t row = segment.row_begin; row < segment.row_end; ++row)
      longest = std::max(longest, plan_.row_kv_len[row]);
    return longest;
  }

  static std::string quoted(std::string text) {
    for (char& c : text)
      if (c == '\n') c = ' ';
    const std::size_t begin = text.find_first_not_of(' ');
    return "“" + (begin == std::string::npos ? text : text.substr(begin)) + "”";
  }

  void line(const std::string& branch, const std::string& name, bool leaf, std::int32_t tokens,
            std::size_t chunks, std::int32_t sequences) const {
    const std::size_t used = examples::display_width(branch);
    const std::string shown = examples::clipped(name, name_width - std::min(used, name_width - 8));
    const std::size_t padding =
        name_width - std::min(name_width, used + examples::display_width(shown));
    std::string bar;
    for (std::size_t i = 0; sequences > 1 && i < marks(sequences); ++i) bar += i == 0 ? " ▪" : "▪";
    fmt::print("  {}{}{}  {:>6}  {:>6}  {:>9}{}\n", examples::dim(branch),
               leaf ? shown : examples::bold(shown), std::string(padding, ' '), tokens, chunks,
               sequences, examples::dim(bar));
  }

  /// Marks of the bar for so many of the plan's sequences, at least one.
  [[nodiscard]] std::size_t marks(std::int32_t sequences) const {
    const auto all = static_cast<std::size_t>(plan_.num_rows);
    const std::size_t full = std::min(all, bar_width);
    return (static_cast<std::size_t>(sequences) * full + all - 1) / all;
  }

  chunkattn::PlanView plan_;
  std::function<std::string(int, int, int)> text_;
  std::function<std::string(int)> title_;
  std::vector<std::vector<std::int32_t>> children_, ends_;
  std::vector<std::int32_t> roots_;
};

}  // namespace shared_prompt
