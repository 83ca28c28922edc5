// A chat whose K/V lies in Redis between its turns: each turn is answered by a server of its own,
// which has nothing but that. Then Redis is killed in the middle of a turn.
//
//   redis SOCKET [PID of the Redis server, to be killed in the last turn]
#include <signal.h>

#include <chrono>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/tiers/tiers.hpp>
#include <chunkattn/transfer/transfer.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "redis_tier.hpp"

namespace {

using namespace chunkattn;
using Token = std::int32_t;
using Tree = PrefixTree<Token, 64>;
using Cache = KvCache<Cpu, half>;
using TreeTiers = Tiers<Tree, Cache>;
constexpr KvCacheOptions geometry{.num_layers = 30, .num_kv_heads = 3, .head_dim = 64};

float value_of(Token token, int position) {
  return static_cast<float>((token * 31 + position * 7) % 97) - 48;
}
/// Calls f(element, what it is to be) for a range of a sequence.
template <class F>
void each(const Tree::Sequence& sequence, TokenRange range, Cache& cache, const F& f) {
  const std::vector<Token> tokens = sequence.tokens();
  for_each_kv_span(sequence, range, cache, [&](const KvSpan<half>& span) {
    for (int t = 0; t < span.length; ++t) {
      const half value =
          to_half(value_of(tokens[static_cast<std::size_t>(span.position + t)], span.position + t));
      for (int i = 0; i < geometry.head_dim; ++i) {
        f(span.k[t * span.stride_token + i], value);
        f(span.v[t * span.v_stride_token + i], value);
      }
    }
  });
}

struct Turn {
  std::size_t found = 0, size = 0, wrong = 0;
  double seconds = 0;
};

/// A server's life: it answers one turn. `kill` is killed as soon as something has come.
Turn answer(const std::vector<Token>& chat, const std::string& socket, pid_t kill = 0) {
  Tree tree;
  Cache cache(tree, geometry);
  TreeTiers tiers(tree, cache, {std::make_shared<examples::RedisTier>(socket)},
                  {.model = "toy", .max_prefetched = 1});
  auto sequence = tree.insert(chat);
  const auto start = std::chrono::steady_clock::now();
  auto load = tiers.load(sequence);
  while (load.poll(sequence))
    if (kill != 0 && sequence.num_written() > 0) {
      ::kill(kill, SIGKILL);
      kill = 0;
    }
  Turn turn;
  turn.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  turn.found = sequence.num_written();
  turn.size = sequence.size();
  each(sequence, {0, static_cast<std::int32_t>(turn.found)}, cache,
       [&](half& element, half is) { turn.wrong += element.bits != is.bits ? 1u : 0u; });
  const TokenRange rest = sequence.loadable();  // an engine computes them in steps
  each(sequence, rest, cache, [](half& element, half is) { element = is; });
  sequence.mark_loaded(rest);
  sequence.leave();
  tiers.store_all();
  tiers.flush();
  return turn;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) return std::fprintf(stderr, "redis SOCKET [PID]\n"), 2;
  const std::string socket = argv[1];
  std::vector<Token> chat;
  std::size_t wrong = 0, found = 0;
  const auto say = [&](const char* what, const Turn& turn) {
    std::printf("%s: %4zu of %4zu tokens came from Redis in %5.1f ms, %.0f MiB\n", what, turn.found,
                turn.size, turn.seconds * 1e3,
                static_cast<double>(turn.found) * 2 * 30 * 3 * 64 * 2 / (1 << 20));
    wrong += turn.wrong;
    found += turn.found;
  };
  for (int number = 1; number <= 4; ++number) {
    for (int i = 0; i < 500; ++i) chat.push_back(1000 * number + i);
    say(("turn " + std::to_string(number)).c_str(), answer(chat, socket));
  }
  if (found != 448 + 960 + 1472) {
    std::puts("FAILED: other tokens were found than were stored");
    return 1;
  }
  if (argc == 3)
    say("Redis is killed", answer(chat, socket, static_cast<pid_t>(std::atoi(argv[2]))));
  if (argc == 3) say("without Redis ", answer(chat, socket));
  std::printf("%zu wrong elements\n", wrong);
  return wrong == 0 ? 0 : 1;
}
