#include "engine.hpp"

#include "tree_engine.hpp"

namespace serve {

std::unique_ptr<Engine> make_engine(const Model& model, Products& products,
                                    const EngineOptions& options) {
  switch (options.chunk_size) {  // a constant of the tree's type
    case 8:
      return std::make_unique<TreeEngine<8>>(model, products, options);
    case 16:
      return std::make_unique<TreeEngine<16>>(model, products, options);
    case 32:
      return std::make_unique<TreeEngine<32>>(model, products, options);
    case 64:
      return std::make_unique<TreeEngine<64>>(model, products, options);
    default:
      throw std::invalid_argument("chunk_size = " + std::to_string(options.chunk_size) +
                                  ": expected 8, 16, 32 or 64");
  }
}

}  // namespace serve
