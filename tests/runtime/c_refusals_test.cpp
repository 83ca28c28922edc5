// What the C interface refuses: every kind of bad input, named as chunkattn.h names it, before
// anything is computed. And what it asks of the C++ front: attention in these tests computes
// nothing, but notes and checks what it is asked for.
#include <doctest/doctest.h>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#define CHUNKATTN_C_KERNELS(X)                \
  X(16, 16, float, float)                     \
  X(16, 24, chunkattn::half, float)           \
  X(16, 24, chunkattn::half, chunkattn::half) \
  X(64, 64, chunkattn::bfloat16, chunkattn::bfloat16)
#define CHUNKATTN_C_EXTERN_KERNELS
#include "chunkattn/c/chunkattn.ipp"
#include "chunkattn/detail/cpu/checks.hpp"
#include "chunkattn/detail/kv/checks.hpp"
#include "support/forked.hpp"
#include "support/random.hpp"

using namespace chunkattn;

namespace {

int calls = 0;                    // of all attentions
CpuOptions asked_for;             // of the one made last
bool uses_threads = false;        // as attention that has something to compute
std::function<void()> interrupt;  // called in each call

class Noting final : public AnyAttention {
 public:
  explicit Noting(OpenMpExecutor& threads) : threads_(threads) {}
  const char* device() const noexcept override { return "none"; }
  const char* instruction_set() const noexcept override { return "none"; }
  int head_dim() const noexcept override { return 16; }
  int value_dim() const noexcept override { return 16; }
  std::span<const ElementType> kv_types() const noexcept override { return {}; }
  std::span<const ElementType> qo_types() const noexcept override { return {}; }
  std::span<const std::string_view> variants() const noexcept override { return {}; }
  void prepare(const LiveView&, void*) override {}
  void prepare(const AnyKvView&, const LiveView&, const AnyVariant&, void*) override {}
  void write(const AnyKvView& layer, const LiveView& plan, const ConstElements&,
             const ConstElements&, void*) override {
    note(layer, plan);
  }
  void run(const AnyKvView& layer, const LiveView& plan, const ConstElements&, const Elements&,
           const RunOptions&) override {
    note(layer, plan);
  }

 private:
  // It refuses what attention refuses, which is in names of C++.
  void note(const AnyKvView& layer, const PlanView& plan) {
    if (uses_threads) threads_.parallel_for(2, [](int) {});
    layer.visit([&](const auto& view) {
      detail::cpu::check_view(view, plan, 16, 16);
      detail::check_pieces(view, plan);
      detail::check_writes(view, plan);
    });
    ++calls;
    if (interrupt) interrupt();
  }
  std::unique_ptr<AnyKvCache> cache_for(detail::ChunkSource, int, ElementType,
                                        const KvCacheOptions&) const override {
    return nullptr;
  }

  OpenMpExecutor& threads_;
};

std::unique_ptr<AnyAttention> note(OpenMpExecutor& threads, const CpuOptions& options) {
  asked_for = options;
  return std::make_unique<Noting>(threads);
}

/// The identifiers of the header, outside of comments.
std::set<std::string> declared_in_c() {
  std::ifstream file(CHUNKATTN_SOURCE_DIR "/include/chunkattn/c/chunkattn.h");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  for (std::size_t at; (at = text.find("/*")) != std::string::npos;)
    text.erase(at, text.find("*/", at) + 2 - at);
  std::set<std::string> names;
  std::string name;
  for (const char c : text + " ") {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_')
      name += c;
    else
      names.insert(std::exchange(name, {}));
  }
  return names;
}

/// What is wrong with a text by its form: "NAME.NAME[INDEX] = VALUE: expected …" in names of C.
std::string fault_of(const std::string& text) {
  static const std::set<std::string> declared = declared_in_c();
  for (const char* const cpp : {"::", "options.", "geometry.", ".size()", ".data()", "chunk_size",
                                "num_chunks", "HeadDim", "sm_scale", "KvView", "kv_len"})
    if (text.find(cpp) != std::string::npos) return std::string("speaks of ") + cpp;
  const std::size_t is = text.find(" = ");
  if (is == std::string::npos || text.find(": expected ", is) == std::string::npos)
    return "is not `name = value: expected …`";
  std::string name = text.substr(0, text.find_first_of("[ "));
  for (std::size_t from = 0; from <= name.size();) {
    const std::size_t dot = std::min(name.find('.', from), name.size());
    if (!declared.contains(name.substr(from, dot - from)))
      return "names " + name + ", which chunkattn.h does not declare";
    from = dot + 1;
  }
  return "";
}

/// The arguments of all calls. A bad one is put in the place of a good one.
struct Input {
  chunkattn_config config{.version = CHUNKATTN_C_VERSION,
                          .head_dim = 16,
                          .value_dim = 0,
                          .num_qo_heads = 4,
                          .num_kv_heads = 2,
                          .kv_type = CHUNKATTN_FLOAT32,
                          .qo_type = CHUNKATTN_FLOAT32,
                          .num_threads = 1,
                          .scale = 0,
                          .accuracy = CHUNKATTN_TWO_TERMS};
  const chunkattn_config* config_given = &config;

  std::int32_t page_size = 4, num_pages = 3, null_page = -1;

  std::vector<std::int32_t> table{0, 1, 0, 2}, lens{5, 6}, starts{0, 1, 2};
  chunkattn_tables tables{table.data(), 2, lens.data(), starts.data(), 2};
  const chunkattn_tables* tables_given = &tables;

  std::vector<float> memory = std::vector<float>(2 * 3 * 2 * 4 * 16, 3.0f);
  chunkattn_layer layer{memory.data(),
                        &memory[3 * 2 * 4 * 16],
                        3,
                        4,
                        {128, 64, 16},
                        {128, 64, 16},
                        nullptr,
                        nullptr,
                        0,
                        {}};
  const chunkattn_layer* layer_given = &layer;

  std::vector<float> four{1, 0.5f, 0.25f, 0.125f};
  chunkattn_variant variant{0, 0, nullptr, nullptr};
  const chunkattn_variant* variant_given = &variant;

  std::vector<std::int64_t> slot_list{3, -1};
  const std::int64_t* slots = slot_list.data();

  std::vector<float> q_rows = std::vector<float>(5 * 70, 1.0f), k_rows = q_rows, v_rows = q_rows,
                     out_rows = std::vector<float>(2 * 64, 7.0f), lse_rows{7, 7, 7, 7, 7, 7, 7, 7};
  const void *q = q_rows.data(), *k = k_rows.data(), *v = v_rows.data();
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  std::int32_t num_tokens = 2;
  void* out = out_rows.data();
  float* lse = lse_rows.data();

  // The same, heads apart too.
  std::vector<float> apart = std::vector<float>(4 * 400, 1.0f);
  chunkattn_rows q_apart{&apart[0], 4 * 20 + 3, 20}, k_apart{&apart[400], 16, 32},
      v_apart{&apart[800], 0, 0}, out_apart{&apart[1200], 70, 17};
  const chunkattn_rows *q_given = &q_apart, *k_given = &k_apart, *v_given = &v_apart,
                       *out_given = &out_apart;

  chunkattn_attention* attention = nullptr;  // those of the test, unless these are null
  chunkattn_plan* plan = nullptr;

  Input() = default;
  Input(const Input&) = delete;
};

enum Call : unsigned {
  create = 1,
  plan_create = 2,
  build = 4,
  store = 8,
  store_slots = 16,
  run = 32,
  store_apart = 64,
  run_apart = 128
};

template <class T>
T* shifted(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
}

/// A bad input: which calls refuse it, and with which text.
struct Bad {
  unsigned calls;
  std::string text;
  std::function<void(Input&)> put;
};

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();

std::vector<Bad> bad_inputs() {
  std::vector<Bad> all;
  const auto bad = [&](unsigned which, std::string text, std::function<void(Input&)> put) {
    all.push_back({which, std::move(text), std::move(put)});
  };
  const unsigned written = store | store_slots, runs = run | run_apart;
  const unsigned planned = store | store_apart | runs, layered = planned | store_slots;
  const auto aligned = [](const char* name, int alignment) {
    return std::string(name) + " = misaligned: expected an address that is a multiple of " +
           std::to_string(alignment);
  };

  // config
  bad(create, "config = null: expected not null", [](Input& i) { i.config_given = nullptr; });
  bad(create, aligned("config", 4), [](Input& i) { i.config_given = shifted(&i.config); });
  bad(create, "config.version = 7: expected CHUNKATTN_C_VERSION = 3",
      [](Input& i) { i.config.version = 7; });
  for (const int dim : {0, -16, -most})
    bad(create, "config.head_dim = " + std::to_string(dim) + ": expected at least 1",
        [=](Input& i) { i.config.head_dim = dim; });
  bad(create, "config.head_dim = 77: expected one that kernels were compiled for: 16, 64",
      [](Input& i) { i.config.head_dim = 77; });
  bad(create, "config.head_dim = 2147483647: expected one that kernels were compiled for: 16, 64",
      [](Input& i) { i.config.head_dim = most; });
  bad(create, "config.value_dim = -1: expected at least 1, or 0 for head_dim",
      [](Input& i) { i.config.value_dim = -1; });
  bad(create,
      "config.value_dim = 64: expected one that kernels were compiled for with head_dim = 16: 16, "
      "24",
      [](Input& i) { i.config.value_dim = 64; });
  bad(create,
      "config.kv_type = 2: expected one that kernels were compiled for with head_dim = 16, "
      "value_dim = 0: 0",
      [](Input& i) { i.config.kv_type = CHUNKATTN_BFLOAT16; });
  bad(create,
      "config.qo_type = 2: expected one that kernels were compiled for with head_dim = 16, "
      "value_dim = 24, kv_type = 1: 0, 1",
      [](Input& i) {
        i.config.value_dim = 24;
        i.config.kv_type = CHUNKATTN_FLOAT16;
        i.config.qo_type = CHUNKATTN_BFLOAT16;
      });
  const std::string types =
      ": expected CHUNKATTN_FLOAT32 = 0, CHUNKATTN_FLOAT16 = 1 or CHUNKATTN_BFLOAT16 = 2";
  for (const int type : {-1, 5})
    bad(create,
        "config.kv_type = " + std::to_string(type) +
            ": expected CHUNKATTN_FLOAT32 = 0, CHUNKATTN_FLOAT16 = 1, CHUNKATTN_BFLOAT16 = 2, "
            "CHUNKATTN_INT8 = 3 or CHUNKATTN_FLOAT8_E4M3 = 4",
        [=](Input& i) { i.config.kv_type = type; });
  bad(create, "config.qo_type = 3" + types, [](Input& i) { i.config.qo_type = 3; });
  bad(create, "config.qo_type = -1" + types, [](Input& i) { i.config.qo_type = -1; });
  bad(create, "config.num_kv_heads = 0: expected at least 1",
      [](Input& i) { i.config.num_kv_heads = 0; });
  for (const int heads : {3, 0, -2, 65538, most})
    bad(create,
        "config.num_qo_heads = " + std::to_string(heads) +
            ": expected a positive multiple of num_kv_heads = 2, at most 65536",
        [=](Input& i) { i.config.num_qo_heads = heads; });
  for (const int threads : {-1, 8193, 100'000, most})
    bad(create,
        "config.num_threads = " + std::to_string(threads) +
            ": expected at most 8192, or 0 for as many as there are CPUs to use",
        [=](Input& i) { i.config.num_threads = threads; });
  const std::string scales = ": expected a positive finite factor, or 0 for 1 / sqrt(head_dim)";
  bad(create, "config.scale = -0.500000" + scales, [](Input& i) { i.config.scale = -0.5f; });
  bad(create, "config.scale = nan" + scales, [](Input& i) { i.config.scale = std::nanf(""); });
  bad(create, "config.scale = inf" + scales, [](Input& i) { i.config.scale = infinity; });
  for (const int accuracy : {2, -1})
    bad(create,
        "config.accuracy = " + std::to_string(accuracy) +
            ": expected CHUNKATTN_TWO_TERMS = 0 or CHUNKATTN_ONE_TERM = 1",
        [=](Input& i) { i.config.accuracy = accuracy; });

  // plan
  bad(plan_create, "page_size = 0: expected at least 1", [](Input& i) { i.page_size = 0; });
  bad(plan_create, "num_pages = -1: expected at least 1", [](Input& i) { i.num_pages = -1; });
  for (const int page : {3, -2})
    bad(plan_create, "null_page = " + std::to_string(page) + ": expected a page from 0 to 2, or -1",
        [=](Input& i) { i.null_page = page; });

  // tables
  bad(build, "tables = null: expected not null", [](Input& i) { i.tables_given = nullptr; });
  bad(build, aligned("tables", 8), [](Input& i) { i.tables_given = shifted(&i.tables); });
  bad(build, "tables.num_sequences = -1: expected a count",
      [](Input& i) { i.tables.num_sequences = -1; });
  for (const std::int64_t stride : {std::int64_t{-2}, huge / 4 / 2 + 1, huge / 4 + 1, huge})
    bad(build,
        "tables.stride = " + std::to_string(stride) +
            ": expected a count of page ids that memory holds",
        [=](Input& i) { i.tables.stride = stride; });
  bad(build, "tables.stride = 1: expected at least 2: the pages of sequence 0",
      [](Input& i) { i.tables.stride = 1; });
  bad(build, "tables.block_table = null: expected not null",
      [](Input& i) { i.tables.block_table = nullptr; });
  bad(build, "tables.seq_lens = null: expected not null",
      [](Input& i) { i.tables.seq_lens = nullptr; });
  bad(build, "tables.query_start_loc = null: expected not null",
      [](Input& i) { i.tables.query_start_loc = nullptr; });
  bad(build, aligned("tables.block_table", 4),
      [](Input& i) { i.tables.block_table = shifted(i.table.data()); });
  bad(build, aligned("tables.seq_lens", 4),
      [](Input& i) { i.tables.seq_lens = shifted(i.lens.data()); });
  bad(build, aligned("tables.query_start_loc", 4),
      [](Input& i) { i.tables.query_start_loc = shifted(i.starts.data()); });
  bad(build, "tables.query_start_loc[0] = 1: expected 0", [](Input& i) { i.starts[0] = 1; });
  bad(build, "tables.query_start_loc[2] = 0: expected at least the one before, 1",
      [](Input& i) { i.starts[2] = 0; });
  bad(build, "tables.seq_lens[1] = -6: expected from 0 to 2147483643",
      [](Input& i) { i.lens[1] = -6; });
  bad(build, "tables.seq_lens[1] = 2147483647: expected from 0 to 2147483643",
      [](Input& i) { i.lens[1] = most; });
  bad(build, "tables.seq_lens[0] = 5: expected at least its 6 query tokens, or 0 for padding",
      [](Input& i) { i.starts = {0, 6, 7}; });
  for (const int page : {3, -1, most})
    bad(build,
        "tables.block_table[3] = " + std::to_string(page) +
            ": expected from 0 to 2, one of num_pages",
        [=](Input& i) { i.table[3] = page; });
  bad(build, "tables.block_table[2] = 9: expected from 0 to 2, one of num_pages", [](Input& i) {
    i.starts = {0, 0, 1};  // the first sequence has no part in it
    i.table = {7, 7, 9, 8};
  });

  // attention, plan
  bad(layered, "attention = null: expected not null", [](Input& i) { i.attention = nullptr; });
  bad(build | planned, "plan = null: expected not null", [](Input& i) { i.plan = nullptr; });
  bad(layered, aligned("attention", alignof(chunkattn_attention)),
      [](Input& i) { i.attention = shifted(i.attention); });
  bad(build | planned, aligned("plan", 8), [](Input& i) { i.plan = shifted(i.plan); });

  // layer
  bad(layered, "layer = null: expected not null", [](Input& i) { i.layer_given = nullptr; });
  bad(layered, aligned("layer", 8), [](Input& i) { i.layer_given = shifted(&i.layer); });
  bad(layered, "layer.k = null: expected memory of K", [](Input& i) { i.layer.k = nullptr; });
  bad(layered, "layer.v = null: expected memory of V", [](Input& i) { i.layer.v = nullptr; });
  bad(layered, aligned("layer.k", 4),
      [](Input& i) { i.layer.k = static_cast<char*>(i.layer.k) + 2; });
  bad(layered, aligned("layer.v", 4),
      [](Input& i) { i.layer.v = static_cast<char*>(i.layer.v) + 1; });
  for (const int pages : {0, -3})
    bad(layered, "layer.num_pages = " + std::to_string(pages) + ": expected at least 1",
        [=](Input& i) { i.layer.num_pages = pages; });
  bad(planned, "layer.num_pages = 2: expected at least those of the plan, 3",
      [](Input& i) { i.layer.num_pages = 2; });
  bad(layered, "layer.page_size = 0: expected at least 1", [](Input& i) { i.layer.page_size = 0; });
  bad(planned, "layer.page_size = 8: expected that of the plan, 4",
      [](Input& i) { i.layer.page_size = 8; });
  for (std::size_t n = 0; n < 3; ++n)
    for (const bool of_v : {false, true}) {
      const auto put = [=](std::int64_t stride) {
        return [=](Input& i) { (of_v ? i.layer.v_strides : i.layer.k_strides)[n] = stride; };
      };
      const std::string name =
          (of_v ? "layer.v_strides[" : "layer.k_strides[") + std::to_string(n) + "] = ";
      for (const std::int64_t stride :
           {std::int64_t{15}, std::int64_t{0}, std::int64_t{-64}, -huge})
        bad(layered, name + std::to_string(stride) + ": expected at least the row's 16 elements",
            put(stride));
      for (const std::int64_t stride : {huge, huge / 4})
        bad(layered, name + std::to_string(stride) + ": expected rows within the address space",
            put(stride));
    }
  bad(layered, "layer.k_strides[0] = 128: expected rows within the address space", [](Input& i) {
    i.layer.k = reinterpret_cast<void*>(std::numeric_limits<std::uintptr_t>::max() - 255);
  });
  for (const std::ptrdiff_t shift : {0, 15, -15})
    bad(written | store_apart, "layer.v = memory of layer.k: expected memory of V of its own",
        [=](Input& i) {
          i.layer.k = i.memory.data() + 16;
          i.layer.v = i.memory.data() + 16 + shift;
        });

  // tokens
  bad(planned, "num_tokens = 1: expected at least the plan's query tokens, 2",
      [](Input& i) { i.num_tokens = 1; });
  bad(planned, "num_tokens = -2147483647: expected at least the plan's query tokens, 2",
      [](Input& i) { i.num_tokens = -most; });
  bad(store_slots, "num_tokens = -1: expected a count", [](Input& i) { i.num_tokens = -1; });
  bad(store_slots, "slots = null: expected not null", [](Input& i) { i.slots = nullptr; });
  bad(store_slots, aligned("slots", 8), [](Input& i) { i.slots = shifted(i.slots); });
  for (const std::int64_t slot : {std::int64_t{12}, huge})
    bad(store_slots,
        "slots[1] = " + std::to_string(slot) + ": expected less than num_pages * page_size = 12",
        [=](Input& i) { i.slot_list[1] = slot; });
  const auto rows = [&](unsigned which, const std::string& name, auto data, auto stride,
                        const std::string& size) {
    bad(which, name + " = null: expected memory of its rows", [=](Input& i) { i.*data = nullptr; });
    bad(which, aligned(name.c_str(), 4),
        [=](Input& i) { i.*data = shifted(static_cast<const char*>(i.*data)); });
    for (const std::string text : {"1", "-1", "-9223372036854775807"})
      bad(which,
          name + "_stride = " + text + ": expected 0, or at least the " + size +
              " elements of a token",
          [=](Input& i) { i.*stride = std::stoll(text); });
    for (const std::int64_t value : {huge, huge / 4})
      bad(which,
          name + "_stride = " + std::to_string(value) + ": expected rows within the address space",
          [=](Input& i) { i.*stride = value; });
  };
  rows(written, "k", &Input::k, &Input::k_stride, "32");
  rows(written, "v", &Input::v, &Input::v_stride, "32");
  rows(run, "q", &Input::q, &Input::q_stride, "64");

  // rows apart
  struct Apart {
    unsigned which;
    const char* name;
    chunkattn_rows Input::* rows;
    const chunkattn_rows* Input::* given;
    int heads;
  };
  for (const Apart& a : {Apart{store_apart, "k", &Input::k_apart, &Input::k_given, 2},
                         Apart{store_apart, "v", &Input::v_apart, &Input::v_given, 2},
                         Apart{run_apart, "q", &Input::q_apart, &Input::q_given, 4},
                         Apart{run_apart, "out", &Input::out_apart, &Input::out_given, 4}}) {
    const std::string name = a.name;
    bad(a.which, name + " = null: expected not null", [=](Input& i) { i.*a.given = nullptr; });
    bad(a.which, aligned(a.name, 8), [=](Input& i) { i.*a.given = shifted(i.*a.given); });
    bad(a.which, name + ".data = null: expected memory",
        [=](Input& i) { (i.*a.rows).data = nullptr; });
    bad(a.which,
        name + ".data = misaligned: expected an address that is a multiple of the element's size",
        [=](Input& i) { (i.*a.rows).data = shifted(static_cast<char*>((i.*a.rows).data)); });
    for (const auto& [field, stride] : {std::pair{".stride_token", &chunkattn_rows::stride_token},
                                        std::pair{".stride_head", &chunkattn_rows::stride_head}}) {
      for (const std::string text : {"15", "-1", "-9223372036854775807"})
        bad(a.which, name + field + " = " + text + ": expected at least the row's 16 elements",
            [=, member = stride](Input& i) { (i.*a.rows).*member = std::stoll(text); });
      for (const std::int64_t value : {huge, huge / 4})
        bad(a.which,
            name + field + " = " + std::to_string(value) +
                ": expected rows within the address space",
            [=, member = stride](Input& i) { (i.*a.rows).*member = value; });
    }
    const int token = (a.heads - 1) * 20 + 16;
    bad(a.which,
        name + ".stride_token = " + std::to_string(token - 1) +
            ": expected rows that do not overlap: at least " + std::to_string(token) +
            ", all heads of a token, or with a stride_head of at least " +
            std::to_string(token + 15) + ", all tokens of a head",
        [=](Input& i) {
          (i.*a.rows).stride_token = token - 1;
          (i.*a.rows).stride_head = 20;
        });
  }
  for (const std::ptrdiff_t at : {1, 15, 83, 83 + 75})
    bad(run_apart,
        "out = memory of q: expected memory of its own, or q itself if it has as many bytes",
        [=](Input& i) { i.out_apart = {i.apart.data() + at, 0, 0}; });
  bad(run_apart, "lse = memory of q: expected memory of its own",
      [](Input& i) { i.lse = i.apart.data() + 15; });
  bad(run_apart, "lse = memory of out: expected memory of its own",
      [](Input& i) { i.lse = i.apart.data() + 1200 + 70 - 8; });

  // out, lse
  bad(run, "out = null: expected memory of its rows", [](Input& i) { i.out = nullptr; });
  bad(run, aligned("out", 4), [](Input& i) { i.out = static_cast<char*>(i.out) + 2; });
  bad(runs, aligned("lse", 4), [](Input& i) { i.lse = shifted(i.lse); });
  const std::string beside_q =
      "out = memory of q: expected memory of its own, or q itself if it has as many bytes";
  for (const std::ptrdiff_t at : {1, 127, -1, -127})
    bad(run, beside_q, [=](Input& i) {
      i.q = i.q_rows.data() + 128;
      i.out = i.q_rows.data() + 128 + at;
    });
  for (const std::ptrdiff_t at : {0, 64, 130})
    bad(run, beside_q, [=](Input& i) {  // in its gaps, too
      i.q_stride = 70;
      i.out = i.q_rows.data() + at;
    });
  for (const std::ptrdiff_t at : {0, 127, -7})
    bad(run, "lse = memory of q: expected memory of its own", [=](Input& i) {
      i.q = i.q_rows.data() + 70;
      i.lse = i.q_rows.data() + 70 + at;
    });
  for (const std::ptrdiff_t at : {0, 127})
    bad(run, "lse = memory of out: expected memory of its own", [=](Input& i) {
      i.q_rows.resize(400);
      i.out = i.k_rows.data();
      i.lse = i.k_rows.data() + at;
    });
  for (const bool of_v : {false, true})
    for (const bool is_lse : {false, true})
      for (const std::ptrdiff_t at : {of_v ? 0 : -1, 0, 200, 383})
        bad(runs,
            std::string(is_lse ? "lse" : "out") + " = memory of layer." + (of_v ? "v" : "k") +
                ": expected memory of its own",
            [=](Input& i) {
              i.memory.resize(1200);
              i.layer.k = i.memory.data() + 1;
              i.layer.v = i.memory.data() + 385;
              float* const where = i.memory.data() + (of_v ? 385 : 1) + at;
              (is_lse ? i.lse : reinterpret_cast<float*&>(i.out)) = where;
              if (!is_lse) i.out_apart = {where, 0, 0};
            });

  // variant
  bad(runs, aligned("variant", 8), [](Input& i) { i.variant_given = shifted(&i.variant); });
  for (const int window : {-1, -most})
    bad(runs,
        "variant.window = " + std::to_string(window) + ": expected a count, or 0 for all keys",
        [=](Input& i) { i.variant.window = window; });
  for (const auto& [text, cap] :
       {std::pair{"-2.000000", -2.0f}, std::pair{"nan", std::nanf("")}, std::pair{"inf", infinity}})
    bad(runs,
        std::string("variant.soft_cap = ") + text +
            ": expected a positive finite bound, or 0 for none",
        [bound = cap](Input& i) { i.variant.soft_cap = bound; });
  bad(runs, "variant.sinks = given: expected null beside soft_cap", [](Input& i) {
    i.variant.soft_cap = 1;
    i.variant.sinks = i.four.data();
  });
  bad(runs, aligned("variant.sinks", 4),
      [](Input& i) { i.variant.sinks = shifted(i.four.data()); });
  bad(runs, aligned("variant.alibi_slopes", 4),
      [](Input& i) { i.variant.alibi_slopes = shifted(i.four.data()); });
  for (int n = 0; n < 3; ++n)
    bad(runs, "variant.alibi_slopes = given: expected null beside window, soft_cap or sinks",
        [=](Input& i) {
          i.variant.alibi_slopes = i.four.data();
          if (n == 0) i.variant.window = 2;
          if (n == 1) i.variant.soft_cap = 1;
          if (n == 2) i.variant.sinks = i.four.data();
        });
  for (std::size_t head = 0; head < 4; ++head)
    for (const auto& [text, slope] : {std::pair{"-0.500000", -0.5f}, std::pair{"0.000000", 0.0f},
                                      std::pair{"nan", std::nanf("")}, std::pair{"inf", infinity}})
      bad(runs,
          "variant.alibi_slopes[" + std::to_string(head) + "] = " + text +
              ": expected a positive finite slope",
          [=, number = slope](Input& i) {
            i.variant.alibi_slopes = i.four.data();
            i.four[head] = number;
          });
  for (const bool is_lse : {false, true})
    for (const bool sinks : {false, true})
      bad(runs,
          std::string(is_lse ? "lse" : "out") + " = memory of variant." +
              (sinks ? "sinks" : "alibi_slopes") + ": expected memory of its own",
          [=](Input& i) {
            i.four.assign(128, 0.5f);
            (sinks ? i.variant.sinks : i.variant.alibi_slopes) = i.four.data();
            (is_lse ? i.lse : reinterpret_cast<float*&>(i.out)) = i.four.data() + 3;
            if (!is_lse) i.out_apart = {i.out, 0, 0};
          });
  return all;
}

/// Objects to call, and the calls.
struct Objects {
  std::unique_ptr<chunkattn_attention, void (*)(chunkattn_attention*)> attention{
      nullptr, chunkattn_attention_destroy};
  std::unique_ptr<chunkattn_plan, void (*)(chunkattn_plan*)> plan{nullptr, chunkattn_plan_destroy};

  Objects() {
    const Input good;
    attention.reset(chunkattn_attention_create(&good.config));
    plan.reset(chunkattn_plan_create(good.page_size, good.num_pages, good.null_page));
    REQUIRE((attention && plan));
    REQUIRE(chunkattn_plan_build(plan.get(), &good.tables) == 0);
  }
  void give(Input& input) const {
    input.attention = attention.get();
    input.plan = plan.get();
  }

  /// Whether the call was refused.
  static bool call(Call which, Input& i) {
    switch (which) {
      case create: {
        chunkattn_attention* const made = chunkattn_attention_create(i.config_given);
        chunkattn_attention_destroy(made);
        return made == nullptr;
      }
      case plan_create: {
        chunkattn_plan* const made = chunkattn_plan_create(i.page_size, i.num_pages, i.null_page);
        chunkattn_plan_destroy(made);
        return made == nullptr;
      }
      case build:
        return chunkattn_plan_build(i.plan, i.tables_given) == 1;
      case store:
        return chunkattn_write(i.attention, i.plan, i.layer_given, i.k, i.k_stride, i.v, i.v_stride,
                               i.num_tokens) == 1;
      case store_slots:
        return chunkattn_write_slots(i.attention, i.layer_given, i.slots, i.k, i.k_stride, i.v,
                                     i.v_stride, i.num_tokens) == 1;
      case run:
        return chunkattn_run(i.attention, i.plan, i.layer_given, i.variant_given, i.q, i.q_stride,
                             i.num_tokens, i.out, i.lse) == 1;
      case store_apart:
        return chunkattn_write_rows(i.attention, i.plan, i.layer_given, i.k_given, i.v_given,
                                    i.num_tokens) == 1;
      case run_apart:
        return chunkattn_run_rows(i.attention, i.plan, i.layer_given, i.variant_given, i.q_given,
                                  i.num_tokens, i.out_given, i.lse) == 1;
    }
    return true;
  }
};

constexpr Call every_call[]{create,      plan_create, build,       store,
                            store_slots, run,         store_apart, run_apart};

// K and V in `memory`, with room between the heads of a page.
void put_heads_apart(Input& i) {
  i.memory.resize(2000);
  for (std::int64_t* const strides : {i.layer.k_strides, i.layer.v_strides}) {
    strides[0] = 200;
    strides[1] = 100;
  }
  i.layer.k = i.memory.data();
  i.layer.v = i.memory.data() + 1000;
}

}  // namespace

template <>
std::unique_ptr<AnyAttention> chunkattn::detail::c::make<16, 16, float, float>(
    OpenMpExecutor& threads, const CpuOptions& options) {
  return note(threads, options);
}
template <>
std::unique_ptr<AnyAttention> chunkattn::detail::c::make<16, 24, half, float>(
    OpenMpExecutor& threads, const CpuOptions& options) {
  return note(threads, options);
}
template <>
std::unique_ptr<AnyAttention> chunkattn::detail::c::make<16, 24, half, half>(OpenMpExecutor&,
                                                                             const CpuOptions&) {
  detail::fail_argument("options.instruction_set", "automatic", "a processor with avx512");
}
template <>
std::unique_ptr<AnyAttention> chunkattn::detail::c::make<64, 64, bfloat16, bfloat16>(
    OpenMpExecutor&, const CpuOptions&) {
  detail::fail(Error("num_threads = 4: expected no more than the system allows"));
}

TEST_CASE("every bad input is refused by its name in C, and nothing is computed") {
  const Objects objects;
  for (const Bad& bad : bad_inputs())
    for (const Call which : every_call) {
      Input input;
      objects.give(input);
      calls = 0;
      CHECK_FALSE(objects.call(which, input));  // before
      if (which >= store) CHECK(calls == 1);
      if ((bad.calls & which) == 0) continue;
      bad.put(input);
      const std::vector<float> memory = input.memory;
      calls = 0;
      CAPTURE(static_cast<int>(which));
      CHECK_MESSAGE(objects.call(which, input), bad.text);
      CHECK(std::string(chunkattn_error()) == bad.text);
      CHECK(fault_of(chunkattn_error()) == "");
      CHECK(calls == 0);
      CHECK(input.memory == memory);
    }
  Input input;  // the plan is that of the batch which was not refused
  objects.give(input);
  chunkattn_sharing sharing{};
  REQUIRE(chunkattn_plan_sharing(input.plan, &sharing) == 0);
  CHECK(sharing.num_tokens == 2);
  CHECK(sharing.num_segments == 3);
  CHECK(sharing.pages_read == 3);
  CHECK(sharing.pages_alone == 4);
  CHECK(chunkattn_plan_sharing(input.plan, nullptr) == 1);
  CHECK(std::string(chunkattn_error()) == "sharing = null: expected not null");
  CHECK(chunkattn_plan_sharing(nullptr, &sharing) == 1);
  CHECK(std::string(chunkattn_error()) == "plan = null: expected not null");
  const Input good;
  const std::unique_ptr<chunkattn_plan, void (*)(chunkattn_plan*)> empty(
      chunkattn_plan_create(4, 3, -1), chunkattn_plan_destroy);
  input.plan = empty.get();
  for (const Call which : {store, run}) {
    CHECK(objects.call(which, input));
    CHECK(std::string(chunkattn_error()) ==
          "plan = not built: expected one of which chunkattn_plan_build() or "
          "chunkattn_step_build() has made a batch's plan");
  }
}

TEST_CASE("bad inputs in any company are refused in names of C") {
  test::Random random(1);
  const Objects objects;
  const std::vector<Bad> all = bad_inputs();
  for (int round = 0; round < test::scaled(3000); ++round) {
    Input input;
    objects.give(input);
    unsigned refusing = 0;
    for (int n = random.uniform(1, 4); n > 0; --n) {
      const Bad& bad = all[random.index(all.size())];
      bad.put(input);
      refusing |= bad.calls;
    }
    calls = 0;
    for (const Call which : every_call) {
      if ((refusing & which) == 0 || !objects.call(which, input)) continue;
      CHECK_MESSAGE(fault_of(chunkattn_error()) == "", std::string(chunkattn_error()));
    }
  }
}

TEST_CASE("good inputs at their edges are taken") {
  const Objects objects;
  const auto taken = [&](Call which, auto put) {
    Input input;
    objects.give(input);
    put(input);
    CHECK_MESSAGE(!objects.call(which, input), std::string(chunkattn_error()));
  };
  taken(create, [](Input& i) { i.config.num_qo_heads = 65536; });
  taken(create, [](Input& i) { i.config.value_dim = 16; });
  taken(create, [](Input& i) { i.config.scale = std::numeric_limits<float>::denorm_min(); });
  taken(plan_create, [](Input& i) { i.null_page = 2; });
  taken(plan_create, [](Input& i) { i.page_size = i.num_pages = most; });
  taken(build, [](Input& i) { i.tables = {nullptr, 0, nullptr, i.starts.data(), 0}; });
  taken(build, [](Input& i) {  // padding alone
    i.lens = {0, 0};
    i.tables.block_table = nullptr;
    i.tables.stride = 0;
  });
  Input rebuilt;
  objects.give(rebuilt);
  REQUIRE_FALSE(objects.call(build, rebuilt));
  taken(run, [](Input& i) { i.variant_given = nullptr; });
  taken(run, [](Input& i) { i.lse = nullptr; });
  taken(run, [](Input& i) { i.out = const_cast<void*>(i.q); });  // q itself
  taken(run, [](Input& i) { i.out = i.q_rows.data() + 128; });   // right behind it
  taken(run, [](Input& i) {                                      // one behind the other
    i.out_rows.resize(128 + 8);
    i.out = i.out_rows.data();
    i.lse = i.out_rows.data() + 128;
  });
  taken(run, [](Input& i) { i.num_tokens = most; });
  taken(run_apart, [](Input& i) { i.out_given = i.q_given; });  // q itself
  taken(run_apart, [](Input& i) {                               // heads first
    i.q_apart = {i.apart.data(), 16, 32};
    i.out_apart = {i.apart.data() + 400, 17, 33};
  });
  taken(run_apart, [](Input& i) {  // in the gaps of q, and lse behind each of a token
    i.q_apart = {i.apart.data(), 140, 16};
    i.out_apart = {i.apart.data() + 64, 140, 16};
    i.lse = i.apart.data() + 128;
  });
  taken(run_apart, [](Input& i) {  // between the heads of a page
    put_heads_apart(i);
    i.out_apart = {i.memory.data() + 64 + 5, 100, 200};
  });
  taken(run, [](Input& i) { i.q_stride = 70; });
  taken(run, [](Input& i) { i.layer.v = i.layer.k; });  // of an engine that has V in K
  taken(run,
        [](Input& i) { i.variant = {most, std::numeric_limits<float>::max(), nullptr, nullptr}; });
  taken(run, [](Input& i) { i.variant = {3, 0, i.four.data(), nullptr}; });
  taken(run, [](Input& i) { i.variant = {0, 0, nullptr, i.four.data()}; });
  taken(run, [](Input& i) {  // more pages than the plan's
    i.memory.resize(2 * 4 * 128);
    i.layer.num_pages = 4;
    i.layer.k = i.memory.data();
    i.layer.v = i.memory.data() + 4 * 128;
  });
  taken(run, [](Input& i) {  // between the heads of a page
    put_heads_apart(i);
    i.lse = i.memory.data() + 64 + 5;
  });
  // Between the pages of a layer: other layers' pages, or whatever the engine has there.
  taken(run, [](Input& i) {
    i.memory.resize(3 * 1000);
    i.layer.k = i.memory.data();
    i.layer.v = i.memory.data() + 128;
    i.layer.k_strides[0] = i.layer.v_strides[0] = 1000;
    i.out = i.memory.data() + 256;
    i.lse = i.memory.data() + 1992;
  });
  for (const Call which : {store, store_slots})
    for (const std::ptrdiff_t shift : {16, -16})
      taken(which, [=](Input& i) {
        i.layer.k = i.memory.data() + 16;
        i.layer.v = i.memory.data() + 16 + shift;
      });
  for (const std::int64_t slot : {std::int64_t{-2}, std::int64_t{-5}, -huge - 1})
    taken(store_slots, [=](Input& i) { i.slot_list = {11, slot}; });
  taken(store_slots, [](Input& i) { i.num_tokens = 0, i.slots = nullptr, i.k = i.v = nullptr; });
  // A batch without query tokens asks for nothing.
  const std::unique_ptr<chunkattn_plan, void (*)(chunkattn_plan*)> empty(
      chunkattn_plan_create(4, 3, -1), chunkattn_plan_destroy);
  for (const bool has_sequences : {false, true}) {
    Input batch;
    batch.plan = empty.get();
    batch.starts = {0, 0, 0};
    if (!has_sequences) batch.tables.num_sequences = 0;
    REQUIRE_FALSE(objects.call(build, batch));
    calls = 0;
    for (const Call which : {store, run, store_apart, run_apart})
      taken(which, [&](Input& i) {
        i.plan = empty.get();
        i.q_apart = i.k_apart = i.v_apart = i.out_apart = {};
        i.q = i.k = i.v = i.out = nullptr;
        i.num_tokens = 0;
      });
    CHECK(calls == 0);
  }
  // One page, head or token has no next one.
  chunkattn_config one_head = Input().config;
  one_head.num_qo_heads = one_head.num_kv_heads = 1;
  std::unique_ptr<chunkattn_attention, void (*)(chunkattn_attention*)> attention(
      chunkattn_attention_create(&one_head), chunkattn_attention_destroy);
  taken(store_slots, [&](Input& i) {
    i.attention = attention.get();
    i.layer.num_pages = i.layer.page_size = 1;
    i.slot_list = {0, 0};
    std::fill_n(i.layer.k_strides, 3, -5);
    std::fill_n(i.layer.v_strides, 3, huge);
  });
}

TEST_CASE("each thread has the text of its last failure until its next one") {
  const Objects objects;
  CHECK(chunkattn_plan_create(0, 1, -1) == nullptr);
  const std::string text = chunkattn_error();
  CHECK(text == "page_size = 0: expected at least 1");
  std::thread([] {
    CHECK(std::string(chunkattn_error()).empty());
    CHECK(chunkattn_plan_create(1, -7, -1) == nullptr);
    CHECK(std::string(chunkattn_error()) == "num_pages = -7: expected at least 1");
  }).join();
  Input input;
  objects.give(input);
  for (const Call which : every_call) CHECK_FALSE(objects.call(which, input));
  CHECK(chunkattn_error() == text);
  CHECK(chunkattn_plan_create(2, 3, 5) == nullptr);
  CHECK(std::string(chunkattn_error()) == "null_page = 5: expected a page from 0 to 2, or -1");
}

TEST_CASE("an attention says how many threads it has") {
  chunkattn_config config = Input().config;
  for (const int threads : {0, 1, 3}) {
    config.num_threads = threads;
    chunkattn_attention* const attention = chunkattn_attention_create(&config);
    REQUIRE(attention != nullptr);
    const std::string wanted =
        ", " + std::to_string(ThreadPool(threads).concurrency()) + " threads";
    CHECK(std::string_view(chunkattn_describe(attention)).ends_with(wanted));
    chunkattn_attention_destroy(attention);
  }
}

TEST_CASE("an attention has the options of its config") {
  const auto made = [](auto change) {
    chunkattn_config config = Input().config;
    change(config);
    chunkattn_attention* const attention = chunkattn_attention_create(&config);
    REQUIRE(attention != nullptr);
    chunkattn_attention_destroy(attention);
    return asked_for;
  };
  using Accuracy = CpuOptions::Accuracy;
  CHECK(made([](auto&) {}).accuracy == Accuracy::two_terms);
  CHECK_FALSE(made([](auto&) {}).sm_scale);
  CHECK(made([](auto& c) { c.accuracy = CHUNKATTN_ONE_TERM; }).accuracy == Accuracy::one_term);
  CHECK(made([](auto& c) { c.scale = 0.25f; }).sm_scale == 0.25f);
  CHECK_FALSE(made([](auto& c) { c.scale = -0.0f; }).sm_scale);
}

TEST_CASE("what is known behind the interface alone gets a name of C, too") {
  chunkattn_config config = Input().config;
  config.kv_type = config.qo_type = CHUNKATTN_FLOAT16;
  config.value_dim = 24;
  CHECK(chunkattn_attention_create(&config) == nullptr);
  CHECK(std::string(chunkattn_error()) ==
        "the processor = this one: expected a processor with avx512");
  config.head_dim = config.value_dim = 64;
  config.kv_type = config.qo_type = CHUNKATTN_BFLOAT16;
  CHECK(chunkattn_attention_create(&config) == nullptr);
  CHECK(std::string(chunkattn_error()) ==
        "config.num_threads = 4: expected no more than the system allows");
}

TEST_CASE("a call while another one uses the attention is refused") {
  const Objects objects;
  int refusals = 0;
  interrupt = [&] {
    if (refusals > 0) return;
    std::thread([&] {
      for (const Call which : {store, store_slots, run}) {
        Input input;
        objects.give(input);
        refusals += objects.call(which, input);
        CHECK(std::string_view(chunkattn_error())
                  .starts_with("attention = in use by another call: "));
        CHECK(fault_of(chunkattn_error()) == "");
      }
    }).join();
  };
  for (const Call which : {store, store_slots, run}) {
    refusals = 0;
    Input input;
    objects.give(input);
    CHECK_FALSE(objects.call(which, input));
    CHECK(refusals == 3);
  }
  interrupt = [] { throw std::bad_alloc(); };  // a call that has failed is over
  Input input;
  objects.give(input);
  CHECK(objects.call(run, input));
  CHECK(std::string(chunkattn_error()) == "out of memory");
  interrupt = [] { throw std::length_error("vector"); };
  CHECK(objects.call(run, input));
  CHECK(std::string(chunkattn_error()) == "out of memory");
  interrupt = [] { throw 1; };
  CHECK(objects.call(store, input));
  CHECK(std::string(chunkattn_error()) == "an unknown exception");
  interrupt = [] { throw Error(std::string(3000, 'x')); };
  CHECK(objects.call(store, input));
  CHECK(std::string(chunkattn_error()) == std::string(1023, 'x'));
  interrupt = nullptr;
  CHECK_FALSE(objects.call(run, input));
}

#if !defined(_WIN32)
TEST_CASE("no call ends the process where the system starts no more threads") {
  constexpr int skipped = 77;
  const std::string refused =
      "config.num_threads = 4: expected no more than the system allows, thread 2 could not be "
      "started";
  const auto says_so = [&] {
    return std::string_view(chunkattn_error()).starts_with(refused) &&
           fault_of(chunkattn_error()).empty();
  };
  const auto try_all = [&](bool with_openmp) {
    if (with_openmp && ::dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr) return skipped;
    Objects objects;
    chunkattn_config config = Input().config;
    config.num_threads = 4;
    objects.attention.reset(chunkattn_attention_create(&config));
    const std::string described = chunkattn_describe(objects.attention.get());
    if (described.ends_with(" threads of OpenMP") != with_openmp) return 1;
    uses_threads = true;
    const auto refuses = [&](Call which) {
      Input input;
      objects.give(input);
      return objects.call(which, input);
    };
    std::atomic<bool> is_limited = false;
    int result = 0;
    std::thread other([&] {
      while (!is_limited) std::this_thread::yield();
      for (const Call which : {store, store_slots, run}) {
        calls = 0;
        const bool is_refused = refuses(which);
        if (is_refused != with_openmp) result = 2;  // whose runtime has threads for each caller
        if (is_refused && (!says_so() || calls != 0)) result = 3;
      }
    });
    if (!test::allow_no_more_threads()) ::_exit(skipped);
    is_limited = true;
    other.join();
    if (result != 0) return result;
    for (const Call which : {store, store_slots, run})
      if (refuses(which)) return 4;
    if (with_openmp) return 0;
    return chunkattn_attention_create(&config) == nullptr && says_so() ? 0 : 5;
  };
  for (const bool with_openmp : {false, true}) {
    CAPTURE(with_openmp);
    const int result =
        test::can_fork ? test::in_child([&] { return try_all(with_openmp); }) : skipped;
    if (result == skipped)
      MESSAGE("SKIPPED: no libgomp.so.1, no user whom limits bind, or ThreadSanitizer");
    else
      CHECK(result == 0);
  }
}
#endif
