#include "engine.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

#include "tree_engines.hpp"

namespace serve {

namespace {

void check(const EngineOptions& options, int ranks) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument(what); };
  if (options.step_tokens < 1) fail("step_tokens = 0: expected at least 1");
  if (!(options.step_seconds > 0)) fail("step_seconds: expected more than 0");
  if (ranks > 1 && std::isfinite(options.step_seconds))
    fail("step_seconds: expected none beside several ranks, whose clocks differ");
  if (options.max_sequences < 1) fail("max_sequences = 0: expected at least 1");
  if (options.on_gpu && options.mode != Mode::tree) fail("mode: expected tree beside on_gpu");
  const bool tiers = options.tiers.memory_bytes > 0 || !options.tiers.directory.empty();
  if (tiers && (options.on_gpu || options.mode == Mode::paged || ranks > 1))
    fail("tiers: expected none beside on_gpu, mode paged, or several ranks");
  if (options.on_gpu && options.preempt != Preempt::recompute)
    fail("preempt: expected recompute beside on_gpu");
}

}  // namespace

std::unique_ptr<Engine> make_engine(const Model& model, Products& products,
                                    const EngineOptions& options) {
  check(options, products.ranks().size());
  switch (options.chunk_size) {  // a constant of the tree's type
    case 8:
      return make_tree_engine<8>(model, products, options);
    case 16:
      return make_tree_engine<16>(model, products, options);
    case 32:
      return make_tree_engine<32>(model, products, options);
    case 64:
      return make_tree_engine<64>(model, products, options);
    default:
      throw std::invalid_argument("chunk_size = " + std::to_string(options.chunk_size) +
                                  ": expected 8, 16, 32 or 64");
  }
}

}  // namespace serve
