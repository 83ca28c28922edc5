// Engines over trees whose chunks have a constant number of tokens, compiled in
// tree_engine_8_16.cpp and tree_engine_32_64.cpp: together they would take a compiler more than 1
// GB.
#pragma once

#include <memory>

#include "engine.hpp"

namespace serve {

template <int ChunkSize>
std::unique_ptr<Engine> make_tree_engine(const Model& model, Products& products,
                                         const EngineOptions& options);

}  // namespace serve
