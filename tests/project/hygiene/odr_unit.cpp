// Compiled once per set of instruction sets, which UNIT names, and linked into one program.
#include "attend.hpp"

struct UNIT;

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const char* CONCAT(isa_, UNIT)() {
  return TEXT(CHUNKATTN_ISA_SET);
}

double CONCAT(attend_, UNIT)(hygiene::Tree& tree, hygiene::Cache& cache, std::vector<float>& out) {
  std::vector<hygiene::Tree::Sequence> sequences;
  hygiene::Attend<UNIT> attend;
  out = attend.run(tree, cache, sequences);
  return attend.error(sequences);
}
