#include "tree_json.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "utf8_stream.hpp"

namespace serve {

std::string tree_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                      const Tokenizer& tokenizer, const TreeRights& rights) {
  using Json = nlohmann::json;
  const std::size_t most_nodes = rights.matches ? 1000 : 0;
  Json nodes = Json::array();
  // Parents stand first, so that no parent is left out before its child.
  for (std::size_t i = 0; i < std::min(tree.nodes.size(), most_nodes); ++i) {
    const TreeSnapshot::Node& node = tree.nodes[i];
    Json one{{"id", node.id},
             {"parent", node.parent},
             {"tokens", node.tokens},
             {"sequences", node.sequences},
             {"tenant", node.tenant}};
    if (rights.texts(node.tenant)) {
      Utf8Stream characters;
      one["text"] = characters.push(tokenizer.decode(node.first_tokens)) + characters.finish();
    }
    nodes.push_back(std::move(one));
  }
  const TierCounts& counts = counters.engine.tiers;
  Json tiers;  // null: there are none
  if (tree.has_tiers)
    tiers = {{"stored_blocks", counts.stored_blocks},
             {"stored_bytes", counts.stored_bytes},
             {"loads", counts.loads},
             {"loads_late", counts.loads_late},
             {"refused_blocks", counts.refused_blocks}};
  if (tree.has_tiers && rights.matches) tiers["loaded_tokens"] = counts.loaded_tokens;
  const TreeSnapshot::Windows& pool = tree.windows;
  Json windows;  // null: there are none
  if (pool.keys > 0)
    windows = {{"keys", pool.keys},        {"chunk_bytes", pool.chunk_bytes},
               {"used", pool.chunks_used}, {"cached", pool.chunks_cached},
               {"free", pool.chunks_free}, {"evicted", pool.evicted_chunks}};
  if (pool.keys > 0 && rights.matches) windows["tokens"] = counters.engine.window_tokens;
  Json all{
      {"nodes", std::move(nodes)},
      {"nodes_left_out",
       rights.matches ? tree.nodes.size() - std::min(tree.nodes.size(), most_nodes) : 0},
      {"chunk_size", tree.chunk_size},
      {"chunk_bytes", tree.chunk_bytes},
      {"chunks",
       {{"used", tree.chunks_used}, {"cached", tree.chunks_cached}, {"free", tree.chunks_free}}},
      {"requests", counters.requests},
      {"waiting", counters.waiting},
      {"prompt_tokens", counters.prompt_tokens},
      {"generated_tokens", counters.generated_tokens},
      {"evicted_tokens", tree.evicted_tokens},
      {"tiers", std::move(tiers)},
      {"windows", std::move(windows)},
      {"preemptions", counters.engine.preemptions}};
  if (rights.matches) all["cached_tokens"] = counters.cached_tokens;
  if (rights.explains) all["explains"] = true;
  if (!rights.failure.empty()) all["failure"] = rights.failure;
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string chunks_json(const std::vector<CachedChunk>& chunks, std::size_t chunk_size,
                        bool salted) {
  nlohmann::json list = nlohmann::json::array();
  for (const CachedChunk& chunk : chunks)
    list.push_back(
        nlohmann::json::array({chunk.parent, chunk.tenant,
                               salted || chunk.tenant == 0 ? chunk.tokens : std::vector<int>()}));
  return nlohmann::json{{"chunk_size", chunk_size}, {"chunks", std::move(list)}}.dump();
}

std::string loads_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                       std::size_t max_requests, bool matches) {
  const std::size_t total = tree.chunks_used + tree.chunks_cached + tree.chunks_free;
  const TreeSnapshot::Windows& windows = tree.windows;
  const auto share = [](auto part, auto whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  const std::size_t running = counters.requests - std::min(counters.waiting, counters.requests);
  nlohmann::json load{{"dp_rank", 0},
                      {"num_running_reqs", running},
                      {"num_waiting_reqs", counters.waiting},
                      {"num_total_reqs", counters.requests},
                      {"num_used_tokens", tree.chunks_used * tree.chunk_size},
                      {"num_total_tokens", tree.chunks_used * tree.chunk_size},
                      {"max_total_num_tokens", total * tree.chunk_size},
                      // What is only cached makes room.
                      {"token_usage", std::max(share(tree.chunks_used, total),
                                               share(windows.chunks_used,
                                                     windows.chunks_used + windows.chunks_cached +
                                                         windows.chunks_free))},
                      {"max_running_requests", max_requests}};
  if (matches) load["cache_hit_rate"] = share(counters.cached_tokens, counters.prompt_tokens);
  return nlohmann::json{{"dp_rank_count", 1}, {"loads", nlohmann::json::array({load})}}.dump();
}

}  // namespace serve
