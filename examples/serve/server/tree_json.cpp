#include "tree_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "utf8_stream.hpp"

namespace serve {

std::string tree_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                      const Tokenizer& tokenizer, bool texts) {
  using Json = nlohmann::json;
  constexpr std::size_t most_nodes = 1000;
  Json nodes = Json::array();
  // Parents stand first, so that what is left out at the end is nobody's parent.
  for (std::size_t i = 0; i < std::min(tree.nodes.size(), most_nodes); ++i) {
    const TreeSnapshot::Node& node = tree.nodes[i];
    Json one{{"id", node.id},
             {"parent", node.parent},
             {"tokens", node.tokens},
             {"sequences", node.sequences},
             {"tenant", node.tenant}};
    if (texts) {
      Utf8Stream characters;
      one["text"] = characters.push(tokenizer.decode(node.first_tokens)) + characters.finish();
    }
    nodes.push_back(std::move(one));
  }
  const Json all{
      {"nodes", std::move(nodes)},
      {"nodes_left_out", tree.nodes.size() - std::min(tree.nodes.size(), most_nodes)},
      {"chunk_size", tree.chunk_size},
      {"chunks",
       {{"used", tree.chunks_used}, {"cached", tree.chunks_cached}, {"free", tree.chunks_free}}},
      {"requests", counters.requests},
      {"waiting", counters.waiting},
      {"prompt_tokens", counters.prompt_tokens},
      {"cached_tokens", counters.cached_tokens},
      {"generated_tokens", counters.generated_tokens},
      {"preemptions", counters.engine.preemptions}};
  return all.dump();
}

}  // namespace serve
