// Bodies in chunks, as httplib is to see them.
#pragma once

#include <cstddef>

#include "request_head.hpp"

namespace serve {

/// Follows a chunked body byte by byte and says which bytes are to be passed on: all but the
/// trailers after its last chunk, which httplib takes for an error.
class TrailerFilter {
 public:
  enum class Verdict { pass, drop, wrong };

  /// A chunked body begins with the next byte.
  void begin() {
    *this = {};
    state_ = State::digits;
  }

  [[nodiscard]] Verdict next(char c) {
    switch (state_) {
      case State::digits:  // of a chunk's length: nothing but these, however strtoul() has it
        if (const int digit = value_of(c); digit >= 0 && ++digits_ <= 15) {
          left_ = 16 * left_ + static_cast<std::size_t>(digit);
          return Verdict::pass;
        }
        if (digits_ == 0 || value_of(c) >= 0 || (c != '\r' && c != ';')) return Verdict::wrong;
        state_ = State::length_line;
        return Verdict::pass;
      case State::length_line:  // the rest of it
        if (++line_ > max_head_bytes) return Verdict::wrong;
        if (c == '\n') state_ = left_ > 0 ? State::data : State::trailer_start;
        return Verdict::pass;
      case State::data:
        if (--left_ == 0) state_ = State::data_end;
        return Verdict::pass;
      case State::data_end:
        if (c == '\n') begin();
        return c == '\n' || c == '\r' ? Verdict::pass : Verdict::wrong;
      case State::trailer_start:
        if (c == '\r') {
          state_ = State::last;
          return Verdict::pass;
        }
        state_ = State::trailer;
        [[fallthrough]];
      case State::trailer:
        if (++line_ > max_head_bytes) return Verdict::wrong;  // of all of them
        if (c == '\n') state_ = State::trailer_start;
        return Verdict::drop;
      case State::last:
        state_ = State::none;
        return c == '\n' ? Verdict::pass : Verdict::wrong;
      default:
        return Verdict::pass;
    }
  }

 private:
  enum class State { none, digits, length_line, data, data_end, trailer_start, trailer, last };

  static int value_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  }

  State state_ = State::none;
  std::size_t left_ = 0;  // of a chunk
  std::size_t digits_ = 0, line_ = 0;
};

}  // namespace serve
