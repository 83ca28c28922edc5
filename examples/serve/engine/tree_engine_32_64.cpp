#include "tree_engine.hpp"

namespace serve {

template std::unique_ptr<Engine> make_tree_engine<32>(const Model&, Products&,
                                                      const EngineOptions&);
template std::unique_ptr<Engine> make_tree_engine<64>(const Model&, Products&,
                                                      const EngineOptions&);

}  // namespace serve
