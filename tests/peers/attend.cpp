// attend CASE OUT: attention of a few sequences with a common prefix, computed as an engine would,
// for transformers_attention.py to compare. Both files are little-endian 32-bit words.
//
// CASE: the header below, the sinks, then per sequence its token ids and, in fp32, q
// [length][num_qo_heads][head_dim], k and v [length][num_kv_heads][head_dim].
// OUT: per element type (fp32, fp16, bf16) and sequence [length][num_qo_heads][head_dim], NaN where
// the sequence found the token's K/V in the cache, so that no step computed its row.
#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

using namespace chunkattn;

namespace {

struct Header {
  std::int32_t num_qo_heads, num_kv_heads, head_dim;
  std::int32_t window;  // 0: none
  float sm_scale;
  float soft_cap;           // 0: none
  std::int32_t num_sinks;   // 0 or num_qo_heads
  std::uint32_t seed;       // of the steps' sizes
  std::int32_t num_decode;  // tokens at the end of each sequence that come one by one
  std::int32_t num_sequences;
};

struct Request {
  std::vector<std::int32_t> tokens;
  std::vector<float> q, k, v;
};

struct Case {
  Header header;
  std::vector<float> sinks;
  std::vector<Request> requests;
};

template <class T>
void read(std::istream& in, std::span<T> values) {
  in.read(reinterpret_cast<char*>(values.data()),
          static_cast<std::streamsize>(values.size_bytes()));
  if (!in) throw std::runtime_error("the case ends too early");
}

Case read_case(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot open " + path);
  Case c;
  read(in, std::span(&c.header, 1));
  c.sinks.resize(static_cast<std::size_t>(c.header.num_sinks));
  read(in, std::span(c.sinks));
  for (std::int32_t i = 0; i < c.header.num_sequences; ++i) {
    std::int32_t length;
    read(in, std::span(&length, 1));
    Request& request = c.requests.emplace_back();
    const auto n = static_cast<std::size_t>(length);
    const auto row = [&](int heads) {
      return static_cast<std::size_t>(heads) * static_cast<std::size_t>(c.header.head_dim);
    };
    request.tokens.resize(n);
    request.q.resize(n * row(c.header.num_qo_heads));
    request.k.resize(n * row(c.header.num_kv_heads));
    request.v.resize(request.k.size());
    read(in, std::span(request.tokens));
    read(in, std::span(request.q));
    read(in, std::span(request.k));
    read(in, std::span(request.v));
  }
  return c;
}

/// Appends the rows of a step's tokens.
void gather(std::vector<float>& to, const std::vector<float>& from, const ScheduledSequence& row,
            std::size_t row_size) {
  const auto begin = from.begin() + static_cast<std::ptrdiff_t>(row.position) *
                                        static_cast<std::ptrdiff_t>(row_size);
  to.insert(
      to.end(), begin,
      begin + static_cast<std::ptrdiff_t>(row.num_rows) * static_cast<std::ptrdiff_t>(row_size));
}

template <class T, int HeadDim, class Variant>
void attend(const Case& c, const Variant& variant, std::ostream& out_file) {
  const Header& h = c.header;
  PrefixTree<std::int32_t, 16> tree;
  KvCache<Cpu, T> kv(tree,
                     {.num_layers = 1, .num_kv_heads = h.num_kv_heads, .head_dim = h.head_dim});
  ChunkAttention<Cpu, HeadDim> attention(2, {.sm_scale = h.sm_scale});
  AttentionPlan plan;
  std::mt19937 random(h.seed);
  const auto qo_row = static_cast<std::size_t>(h.num_qo_heads * h.head_dim);
  const auto kv_row = static_cast<std::size_t>(h.num_kv_heads * h.head_dim);

  std::vector<std::vector<float>> results;
  std::vector<PrefixTree<std::int32_t, 16>::Sequence> sequences;
  for (const Request& request : c.requests) {
    const auto prompt = std::span(request.tokens)
                            .first(request.tokens.size() - static_cast<std::size_t>(h.num_decode));
    sequences.push_back(tree.insert(prompt));
    results.emplace_back(request.q.size(), std::numeric_limits<float>::quiet_NaN());
  }
  for (int decoded = -1; decoded < h.num_decode;) {
    auto step = tree.begin_step();
    std::vector<std::pair<std::size_t, ScheduledSequence>> rows;
    std::vector<float> q, k, v;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const auto added = step.add(sequences[i], decoded < 0 ? 1 + random() % 50 : 1);
      if (!added) continue;
      rows.push_back({i, added.row()});
      gather(q, c.requests[i].q, added.row(), qo_row);
      gather(k, c.requests[i].k, added.row(), kv_row);
      gather(v, c.requests[i].v, added.row(), kv_row);
    }
    const auto view = plan.build(step);
    if (!view) {  // all prompts are computed, or the decoded token of each
      ++decoded;
      for (std::size_t i = 0; i < sequences.size() && decoded < h.num_decode; ++i)
        sequences[i].append({&c.requests[i].tokens[sequences[i].size()], 1});
      continue;
    }
    std::vector<float> out(q.size());
    attention.write(kv.layer(0), view, k, v);
    attention.run(kv.layer(0), view, variant, q, out);
    for (const auto& [i, row] : rows) {
      const auto from = out.begin() + static_cast<std::ptrdiff_t>(row.first_row) *
                                          static_cast<std::ptrdiff_t>(qo_row);
      std::copy_n(from, static_cast<std::size_t>(row.num_rows) * qo_row,
                  results[i].begin() + static_cast<std::ptrdiff_t>(row.position) *
                                           static_cast<std::ptrdiff_t>(qo_row));
    }
    (void)std::move(step).finish();  // the tokens to come are known
  }
  for (const auto& result : results)
    out_file.write(reinterpret_cast<const char*>(result.data()),
                   static_cast<std::streamsize>(result.size() * sizeof(float)));
}

template <int HeadDim>
void attend_in_every_type(const Case& c, const auto& variant, std::ostream& out) {
  attend<float, HeadDim>(c, variant, out);
  attend<half, HeadDim>(c, variant, out);
  attend<bfloat16, HeadDim>(c, variant, out);
}

/// The variants as docs/variants.md names them for these models.
void attend(const Case& c, std::ostream& out) {
  const Header& h = c.header;
  const SlidingWindow window{h.window};
  const SoftCap soft_cap{h.soft_cap};
  const Sinks sinks{c.sinks};
  const bool windowed = h.window > 0;
  if (h.head_dim == 64 && h.num_sinks == 0) {
    attend_in_every_type<64>(c, NoVariant{}, out);
  } else if (h.head_dim == 64) {
    windowed ? attend_in_every_type<64>(c, combine(sinks, window), out)
             : attend_in_every_type<64>(c, sinks, out);
  } else if (h.head_dim == 128) {
    attend_in_every_type<128>(c, window, out);
  } else if (h.head_dim == 256 && h.soft_cap > 0) {
    windowed ? attend_in_every_type<256>(c, combine(soft_cap, window), out)
             : attend_in_every_type<256>(c, soft_cap, out);
  } else if (h.head_dim == 256) {
    windowed ? attend_in_every_type<256>(c, window, out)
             : attend_in_every_type<256>(c, NoVariant{}, out);
  } else {
    throw std::invalid_argument("head_dim = " + std::to_string(h.head_dim) +
                                ": expected 64, 128 or 256");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: attend CASE OUT\n", stderr);
    return 2;
  }
  try {
    std::ofstream out(argv[2], std::ios::binary);
    attend(read_case(argv[1]), out);
    out.close();
    if (!out) throw std::runtime_error(std::string("cannot write ") + argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attend: %s\n", error.what());
    return 1;
  }
}
