// A header of known faults, for the tool's test of itself. Comments name, for each operator with
// faults in the line below, what becomes of them; | separates the fates of several.
#pragma once

namespace toy {

template <class T>
struct Range {
  T begin{0};
  T end{0};
  constexpr bool has(T value) const {
    // expect comparison: killed
    return begin <= value && value < end;
  }
};
static_assert(Range<int>{1, 3}.has(1));

inline int clamped(int i, int size) {
  // expect comparison: survived
  // expect off by one: killed|survived
  // expect deleted statement: killed
  if (i < 0) return 0;
  // expect comparison: killed
  // expect off by one: killed
  // expect deleted statement: killed
  if (i >= size) return size - 1;
  return i;
}

inline int never_called(int x) {
  // expect off by one: not reached
  return x + 2;
}

inline int weighed(int a, int b) {
  // expect off by one: killed
  return 2 * a + b;
}

inline int entry(const int* values, int i) {
  return values[i];
}

template <int N>
int total(const int (&values)[N]) {
  constexpr int first = N > 2 ? 1 : 0;  // the compiler must know it: no fault
  // expect off by one: killed
  int result = 0;
  // expect comparison: killed
  // expect off by one: killed
  for (int i = first; i < N; ++i)
    // expect deleted statement: killed
    result += values[i];
  // expect deleted statement: killed
  // expect swapped arguments: killed
  // expect off by one: killed
  result += weighed(2, 1);
  // expect deleted statement: killed
  // expect swapped arguments: refused
  // expect off by one: killed
  result += entry(values + 1, 1);
  // expect comparison: survived
  // expect off by one: survived
  if (N << 1 >= 4 && result >> 3 == 7) {
  }
  return result;
}

#if defined(TOY_OF_ANOTHER_MACHINE)
inline int elsewhere(int x) {
  return x < 3 ? 4 : 5;  // not compiled: no fault
}
#endif

inline int halvings(int x) {
  // expect off by one: killed
  int count = 0;
  // expect comparison: killed
  // expect off by one: killed
  while (x > 1) {
    // expect deleted statement: timed out
    // expect off by one: killed|timed out
    x /= 2;
    // expect deleted statement: killed
    ++count;
  }
  return count;
}

}  // namespace toy
