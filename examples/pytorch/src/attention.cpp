// Attention, its K/V memory and its threads; tensors, by DLPack.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chunkattn/runtime/make_attention.hpp>
#include <chunkattn/variants.hpp>
#include <cstring>

#include "kernels.hpp"
#include "python.hpp"
#include "workers.hpp"

namespace binding {
namespace {

using nb::literals::operator""_a;
using namespace chunkattn;
using Array = nb::ndarray<nb::device::cpu>;
using ReadOnly = nb::ndarray<nb::ro, nb::device::cpu>;

ElementType type_named(const std::string& name) {
  for (const auto& [known, type] :
       {std::pair("float32", ElementType::float32), std::pair("float16", ElementType::half),
        std::pair("bfloat16", ElementType::bfloat16), std::pair("int8", ElementType::int8)})
    if (name == known) return type;
  refuse("dtype", "'" + name + "'", "'float32', 'float16', 'bfloat16' or 'int8'");
}
const char* torch_name_of(ElementType type) {
  return type == ElementType::float32 ? "float32"
         : type == ElementType::half  ? "float16"
                                      : chunkattn::name_of(type);
}

template <class A>
std::string shape_of(const A& array) {
  std::string text = "(";
  for (std::size_t i = 0; i < array.ndim(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(array.shape(i));
  return text + ")";
}

/// What a tensor has: [..., rows, heads, dim], the elements of a row side by side, of a type that
/// kernels take.
template <class To, class Void, class A>
To elements_of(nb::handle tensor, const char* name, std::int32_t rows, int dim) {
  A array;
  if (!nb::try_cast(tensor, array, false))
    refuse(name, nb::cast<std::string>(nb::str(tensor.type())),
           "a tensor or array in host memory, which may be written if it is an output");
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  using Code = nb::dlpack::dtype_code;
  if (!is(Code::Float, 32) && !is(Code::Float, 16) && !is(Code::Bfloat, 16))
    refuse(std::string(name) + ".dtype", "another", "float32, float16 or bfloat16");
  const ElementType element = is(Code::Float, 32)   ? ElementType::float32
                              : is(Code::Float, 16) ? ElementType::half
                                                    : ElementType::bfloat16;
  const std::size_t n = array.ndim();
  bool fits = n >= 3 && array.shape(n - 1) == static_cast<std::size_t>(dim) &&
              array.shape(n - 3) == static_cast<std::size_t>(rows);
  for (std::size_t i = 0; fits && i + 3 < n; ++i) fits = array.shape(i) == 1;
  if (!fits)
    refuse(std::string(name) + ".shape", shape_of(array),
           "(" + std::to_string(rows) + ", heads, " + std::to_string(dim) + ")");
  if (dim > 1 && array.stride(n - 1) != 1)
    refuse(std::string(name) + ".stride(-1)", std::to_string(array.stride(n - 1)),
           "1: the elements of a row side by side, see contiguous()");
  return To(element, HeadRows<Void>{static_cast<Void*>(array.data()), rows,
                                    static_cast<std::int32_t>(array.shape(n - 2)), dim,
                                    array.stride(n - 3), array.stride(n - 2)});
}

/// Logits or slopes, one for each query head.
std::span<const float> per_head(nb::handle tensor, const char* name) {
  nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> array;
  if (!nb::try_cast(tensor, array, false))
    refuse(name, nb::cast<std::string>(nb::str(tensor.type())),
           "a dense float32 tensor [num_qo_heads] in host memory");
  return {array.data(), array.size()};
}

/// Writes to the chunk that a tree hands out first, in each layer: the system provides memory at
/// its first use, a huge page of each layer at once, for which the first request would have to
/// wait.
void touch_first_chunk(AnyKvCache& memory, Workers& workers) {
  std::vector<AnyKvView> layers;
  for (int layer = 0; layer < memory.options().num_layers; ++layer)
    layers.push_back(memory.layer(layer));
  const nb::gil_scoped_release released;
  const auto turn = workers.lock();
  workers.parallel_for(static_cast<int>(layers.size()), [&](int at) {
    layers[static_cast<std::size_t>(at)].visit([](const auto& view) {
      std::memset(static_cast<void*>(view.k_slabs[0]), 0,
                  static_cast<std::size_t>(view.stride_chunk) * sizeof *view.k_slabs[0]);
    });
  });
}

/// A window that hides nothing.
constexpr std::int32_t no_window = std::numeric_limits<std::int32_t>::max();

AnyVariant variant_of(std::optional<std::int32_t> window, std::int32_t keep,
                      std::optional<float> soft_cap, nb::handle sinks, nb::handle alibi) {
  const SlidingWindow seen{window.value_or(no_window), keep};
  const int others = soft_cap.has_value() + !sinks.is_none() + !alibi.is_none();
  if (others > 1 || (!alibi.is_none() && window))
    refuse("variant", "several at once",
           "one of soft_cap and sinks, each with or without a window, or alibi");
  if (soft_cap) return combine(SoftCap{*soft_cap}, seen);
  if (!sinks.is_none()) return combine(Sinks{per_head(sinks, "sinks")}, seen);
  if (!alibi.is_none()) return Alibi{per_head(alibi, "alibi")};
  if (window) return seen;
  return {};
}

template <class Enum>
Enum chosen(const char* argument, const std::string& name,
            std::initializer_list<std::pair<const char*, Enum>> choices) {
  std::string known;
  for (const auto& [choice, value] : choices) {
    if (name == choice) return value;
    known += (known.empty() ? "'" : ", '") + std::string(choice) + "'";
  }
  refuse(argument, "'" + name + "'", "one of " + known);
}

struct Cache {
  std::unique_ptr<AnyKvCache> memory;
};

class Attention {
 public:
  Attention(int head_dim, std::optional<int> value_dim, std::shared_ptr<Workers> threads,
            std::optional<float> scale, const std::string& reduce, const std::string& accuracy)
      : workers_(std::move(threads)) {
    CpuOptions options;
    options.sm_scale = scale;
    using Reduce = CpuOptions::Reduce;
    options.reduce = chosen<Reduce>("reduce", reduce,
                                    {{"deterministic", Reduce::deterministic},
                                     {"spin_lock", Reduce::spin_lock},
                                     {"batch_invariant", Reduce::batch_invariant}});
    using Accuracy = CpuOptions::Accuracy;
    options.accuracy = chosen<Accuracy>("accuracy", accuracy,
                                        {{"fp32", Accuracy::fp32},
                                         {"two_terms", Accuracy::two_terms},
                                         {"one_term", Accuracy::one_term}});
    attention_ = make_attention({head_dim, value_dim.value_or(head_dim)}, *workers_, options);
  }

  [[nodiscard]] const AnyAttention& get() const { return *attention_; }
  [[nodiscard]] const std::shared_ptr<Workers>& workers() const { return workers_; }

  /// \param chunks  of a tree, or of layers with a window
  template <class Chunks>
  Cache make_cache(const Chunks& chunks, const std::string& dtype, int num_layers,
                   int num_kv_heads) const {
    Cache cache{attention_->make_cache(chunks, type_named(dtype),
                                       {.num_layers = num_layers, .num_kv_heads = num_kv_heads})};
    cache.memory->grow(1);
    touch_first_chunk(*cache.memory, *workers_);
    return cache;
  }

  void write(Cache& cache, int layer, const View& view, nb::handle k, nb::handle v) {
    const AnyKvView memory = cache.memory->layer(layer);
    const auto rows = view.view.num_rows;
    const auto keys =
        elements_of<ConstElements, const void, ReadOnly>(k, "k", rows, attention_->head_dim());
    const auto values =
        elements_of<ConstElements, const void, ReadOnly>(v, "v", rows, attention_->value_dim());
    without_gil(view, [&] { attention_->write(memory, view.arrays(), keys, values); });
  }

  void run(Cache& cache, int layer, const View& view, nb::handle q, nb::handle out, nb::handle lse,
           std::optional<std::int32_t> window, std::int32_t keep, std::optional<float> soft_cap,
           nb::handle sinks, nb::handle alibi) {
    const AnyKvView memory = cache.memory->layer(layer);
    const auto rows = view.view.num_rows;
    const auto query =
        elements_of<ConstElements, const void, ReadOnly>(q, "q", rows, attention_->head_dim());
    const auto result =
        elements_of<Elements, void, Array>(out, "out", rows, attention_->value_dim());
    AnyAttention::RunOptions options;
    options.variant = variant_of(window, keep, soft_cap, sinks, alibi);
    if (!lse.is_none()) {
      nb::ndarray<float, nb::c_contig, nb::device::cpu> array;
      if (!nb::try_cast(lse, array, false))
        refuse("lse", nb::cast<std::string>(nb::str(lse.type())),
               "a dense float32 tensor [num_rows, num_qo_heads] in host memory");
      options.lse = {array.data(), array.size()};
    }
    without_gil(view, [&] { attention_->run(memory, view.arrays(), query, result, options); });
  }

 private:
  /// Calls f while other threads of Python run; the plan must stay as it is meanwhile.
  template <class F>
  void without_gil(const View& view, const F& f) {
    struct Reader {
      Plan* plan;
      explicit Reader(Plan* read) : plan(read) {
        if (plan) ++plan->readers;
      }
      ~Reader() {
        if (plan) --plan->readers;
      }
    } reader(view.plan.get());
    const nb::gil_scoped_release released;
    const auto turn = workers_->lock();
    f();
  }

  std::shared_ptr<Workers> workers_;
  std::unique_ptr<AnyAttention> attention_;
};

void bind_cache(nb::module_& module) {
  nb::class_<Cache>(module, "KvCache", "K and V of every layer, for the chunks of a tree.")
      .def_prop_ro("dtype", [](const Cache& c) { return torch_name_of(c.memory->type()); })
      .def_prop_ro("num_layers", [](const Cache& c) { return c.memory->options().num_layers; })
      .def_prop_ro("num_kv_heads", [](const Cache& c) { return c.memory->options().num_kv_heads; })
      .def_prop_ro(
          "num_chunks", [](const Cache& c) { return c.memory->num_chunks(); },
          "Chunks that have memory.")
      .def_prop_ro(
          "bytes_per_chunk", [](const Cache& c) { return c.memory->bytes_per_chunk(); },
          "Of all layers together.")
      .def_prop_ro(
          "bytes", [](const Cache& c) { return c.memory->bytes(); }, "Allocated so far.")
      .def(
          "grow", [](Cache& c, std::size_t n) { c.memory->grow(n); }, "num_chunks"_a,
          "Provides memory for so many chunks.");
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Workers>(module, "Threads",
                      "Threads that kernels run on. Several Attention objects may share them.")
      .def(nb::init<int>(), "count"_a = 0)
      .def_prop_ro("count", &Workers::concurrency)
      .def_prop_ro("are_openmp", &Workers::are_openmp,
                   "Whether they are those of the OpenMP runtime that torch uses.");
  bind_cache(module);
  module.def(
      "head_sizes",
      [] {
        std::vector<std::pair<int, int>> sizes;
        for (const HeadSize& size : head_sizes()) sizes.emplace_back(size.head_dim, size.value_dim);
        return sizes;
      },
      "The (head_dim, value_dim) that kernels were compiled for.");
  nb::class_<Attention>(module, "Attention",
                        "Attention over a tree, for one size of heads. One object serves every "
                        "layer.\n\nscale: the factor of q.k, by default 1 / sqrt(head_dim).")
      .def(nb::init<int, std::optional<int>, std::shared_ptr<Workers>, std::optional<float>,
                    const std::string&, const std::string&>(),
           "head_dim"_a, "value_dim"_a = nb::none(), nb::kw_only(), "threads"_a,
           "scale"_a = nb::none(), "reduce"_a = "deterministic", "accuracy"_a = "two_terms")
      .def_prop_ro("head_dim", [](const Attention& a) { return a.get().head_dim(); })
      .def_prop_ro("value_dim", [](const Attention& a) { return a.get().value_dim(); })
      .def_prop_ro("threads", &Attention::workers)
      .def("make_cache", &Attention::make_cache<Tree>, "tree"_a, "dtype"_a, "num_layers"_a,
           "num_kv_heads"_a, nb::keep_alive<0, 2>(),
           "K/V memory for the chunks of a tree, of 'float32', 'float16', 'bfloat16' or 'int8'.")
      .def("make_cache", &Attention::make_cache<WindowedLayers>, "layers"_a, "dtype"_a,
           "num_layers"_a, "num_kv_heads"_a, nb::keep_alive<0, 2>(),
           "The same for the chunks of a WindowedLayers.")
      .def("write", &Attention::write, "cache"_a, "layer"_a, "view"_a, "k"_a, "v"_a,
           "Stores K and V of a step's rows: k (num_rows, num_kv_heads, head_dim), v alike with "
           "value_dim; the elements of a row side by side, other strides as they are.")
      .def("run", &Attention::run, "cache"_a, "layer"_a, "view"_a, "q"_a, "out"_a,
           "lse"_a = nb::none(), nb::kw_only(), "window"_a = nb::none(), "keep"_a = 0,
           "soft_cap"_a = nb::none(), "sinks"_a = nb::none(), "alibi"_a = nb::none(),
           "Causal attention of a step's rows: q (num_rows, num_qo_heads, head_dim) and out alike "
           "with value_dim; strides as of write(). window: a row sees the last so many keys, and "
           "the first `keep`; "
           "soft_cap: logits stay within it; sinks, alibi: float32 (num_qo_heads).")
      .def("__repr__",
           [](const Attention& a) { return "<chunkattn.Attention: " + describe(a.get()) + ">"; });
}

}  // namespace binding
