// Compiled once per instruction set (UNIT names it); all results are linked into one program.
#include "attend.hpp"

struct UNIT;

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)

const char* CONCAT(isa_, UNIT)() {
  return chunkattn::instruction_set();
}

double CONCAT(attend_, UNIT)(hygiene::Tree& tree, hygiene::Cache& cache, std::vector<float>& out) {
  std::vector<hygiene::Tree::Sequence> sequences;
  hygiene::Attend<UNIT> attend;
  out = attend.run(tree, cache, sequences);
  return attend.error(sequences);
}
