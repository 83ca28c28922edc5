// The toy's test: notices what toy.hpp says.
#include "toy.hpp"

int main() {
  const int values[] = {100, 20, 3};
  const toy::Range<int> range{1, 3};
  const bool passed = range.has(1) && range.has(2) && !range.has(3) && toy::clamped(-1, 4) == 0 &&
                      toy::clamped(0, 4) == 0 && toy::clamped(4, 4) == 3 &&
                      toy::clamped(9, 4) == 3 && toy::clamped(3, 4) == 3 &&
                      toy::total(values) == 31 && toy::halvings(8) == 3 && toy::halvings(1) == 0;
  return passed ? 0 : 1;
}
