// What ggml loads: a registry of one device, which is an accelerator beside the CPU. It computes
// FLASH_ATTN_EXT in host memory and owns no memory. ggml asks supports_op of each node, and gives
// what is declined to its own code.
#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml-impl.h>

#include <atomic>
#include <chunkattn/version.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string_view>

#include "attention_op.hpp"
#include "evaluations.hpp"
#include "kernels.hpp"

#define PLUGIN_TEXT_OF(x) #x
#define PLUGIN_TEXT(x) PLUGIN_TEXT_OF(x)
#define PLUGIN_VERSION                 \
  PLUGIN_TEXT(CHUNKATTN_VERSION_MAJOR) \
  "." PLUGIN_TEXT(CHUNKATTN_VERSION_MINOR) "." PLUGIN_TEXT(CHUNKATTN_VERSION_PATCH)

namespace {

constexpr const char* name = "chunkattn";
constexpr const char* description = "ChunkAttention " PLUGIN_VERSION;
// ggml promises nothing between versions about the structs that it shares with backends.
constexpr const char* built_for = "built for ggml " PLUGIN_GGML_VERSION;

// --- the backend: what computes ---

struct Context {
  plugin::AttentionOp op;
  plugin::Evaluations evaluations;
};
Context& context_of(ggml_backend_t backend) {
  return *static_cast<Context*>(backend->context);
}

// How many nodes of attention a scheduler has asked for: more than before, where a graph was made.
std::atomic<std::uint64_t> nodes_asked_for = 0;

void free_backend(ggml_backend_t backend) {
  const plugin::AttentionOp::Totals& totals = context_of(backend).op.totals();
  if (std::getenv("CHUNKATTN_GGML_STATISTICS") != nullptr)  // not by the log, which may be filtered
    std::fprintf(stderr,
                 "%s: %lld calls, %lld plans, of which %lld as tables; plans %.3f ms, attention "
                 "%.3f ms\n",
                 name, static_cast<long long>(totals.calls), static_cast<long long>(totals.plans),
                 static_cast<long long>(totals.tables), 1e3 * totals.plan_s,
                 1e3 * totals.attention_s);
  delete &context_of(backend);
  delete backend;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) {
  auto& [op, evaluations] = context_of(backend);
  if (evaluations.begins(graph->uid, nodes_asked_for)) op.forget_masks();
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor& node = *ggml_graph_node(graph, i);
    // Views and the like are in a graph, but there is nothing to compute.
    if (node.op != GGML_OP_FLASH_ATTN_EXT || (node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
    try {
      op.run(node);
    } catch (const std::bad_alloc&) {
      return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception& error) {
      GGML_LOG_ERROR("%s: %s: %s\n", name, node.name, error.what());
      return GGML_STATUS_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

void set_n_threads(ggml_backend_t backend, int count) {
  context_of(backend).op.set_threads(count);
}

ggml_guid_t guid() {
  static ggml_guid bytes = {0xc4, 0x0c, 0x1e, 0xa7, 0x51, 0x0b, 0x4d, 0x9e,
                            0x93, 0x6a, 0x2f, 0x80, 0x77, 0x1d, 0xe2, 0x45};
  return &bytes;
}

ggml_backend_t make_backend(ggml_backend_dev_t device, const char*) {
  try {
    ggml_backend_i functions{};
    functions.get_name = [](ggml_backend_t) { return name; };
    functions.free = free_backend;
    functions.graph_compute = compute;
    auto context = std::make_unique<Context>();
    context->op.set_threads(GGML_DEFAULT_N_THREADS);
    auto* const backend = new ggml_backend{guid(), functions, device, context.get()};
    context.release();
    return backend;
  } catch (const std::exception& error) {
    GGML_LOG_ERROR("%s: %s\n", name, error.what());
    return nullptr;
  }
}

// --- the device ---

void get_memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
  *free = *total = 0;  // none of its own
}

// A member that the oldest versions lack.
void allow_mmap(auto& caps) {
  if constexpr (requires { caps.mmap_support; }) caps.mmap_support = true;
}

void get_props(ggml_backend_dev_t, ggml_backend_dev_props* props) {
  *props = {};
  props->name = name;
  props->description = description;
  props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
  props->caps.buffer_from_host_ptr = true;
  allow_mmap(props->caps);
}

/// Says once for each reason that an attention is left to ggml.
void log_declined(const char* reason) {
  static std::mutex mutex;
  static std::set<std::string_view> logged;
  const std::lock_guard guard(mutex);
  if (logged.insert(reason).second)
    GGML_LOG_WARN("%s: an attention is left to ggml's own code: %s\n", name, reason);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    case GGML_OP_FLASH_ATTN_EXT:
      ++nodes_asked_for;
      if (const char* const reason = plugin::reason_to_decline(*node)) {
        log_declined(reason);
        return false;
      }
      return true;
    default:
      return false;
  }
}

ggml_backend_device_i device_functions() {
  ggml_backend_device_i functions{};
  functions.get_name = [](ggml_backend_dev_t) { return name; };
  functions.get_description = [](ggml_backend_dev_t) { return description; };
  functions.get_memory = get_memory;
  functions.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
  functions.get_props = get_props;
  functions.init_backend = make_backend;
  functions.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
  functions.buffer_from_host_ptr = [](ggml_backend_dev_t, void* memory, std::size_t size,
                                      std::size_t) {
    return ggml_backend_cpu_buffer_from_ptr(memory, size);
  };
  functions.supports_op = supports_op;
  functions.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return ggml_backend_buft_is_host(type);
  };
  return functions;
}

// --- the registry ---

ggml_backend_dev_t get_device(ggml_backend_reg_t registry, std::size_t) {
  static ggml_backend_device device{device_functions(), registry, nullptr};
  return &device;
}

void* get_proc_address(ggml_backend_reg_t, const char* function) {
  if (std::strcmp(function, "ggml_backend_set_n_threads") == 0)
    return reinterpret_cast<void*>(&set_n_threads);
  return nullptr;
}

ggml_backend_reg_t registry() {
  static ggml_backend_reg one{
      GGML_BACKEND_API_VERSION,
      {[](ggml_backend_reg_t) { return name; }, [](ggml_backend_reg_t) { return std::size_t{1}; },
       get_device, get_proc_address},
      nullptr};
  return &one;
}

}  // namespace

/// 0 where the processor lacks what kernels were compiled for: ggml then continues without.
extern "C" __attribute__((visibility("default"))) int ggml_backend_score() {
  return plugin::kernels_run_here() ? 1 : 0;
}

/// The registry, or null for another version of ggml than this was compiled with: ggml then says
/// that it continues without.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  constexpr std::size_t version = sizeof "built for ggml " - 1;
  if (std::strcmp(ggml_version(), built_for + version) != 0) {
    GGML_LOG_ERROR("%s: %s, but this is ggml %s: not used\n", name, built_for, ggml_version());
    return nullptr;
  }
  return registry();
}
