// Forward declarations, for headers that only mention the library's types, and the devices. Default
// template arguments are here, but for those of ChunkAttention (attention_options.hpp).
#pragma once

#include "allocator.hpp"
#include "detail/support/config.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The device of KvCache and ChunkAttention: the host's processor.
struct Cpu {};

/// The device of KvCache and ChunkAttention: an NVIDIA GPU. Files that use it need nvcc.
struct Cuda {};

/// What a device brings: the CPU's, which cuda.cuh specialises for a GPU.
template <class Device>
struct DeviceTraits {
  /// What calls are enqueued on: nothing, they have computed when they return.
  struct stream {};
};

/// Empty on the CPU, cudaStream_t on a GPU.
template <class Device>
using DeviceStream = typename DeviceTraits<Device>::stream;

template <TokenType Token, int ChunkSize = 64, ChunkAllocator Allocator = PoolAllocator,
          RetentionPolicy Retention = RetentionOptions>
class PrefixTree;
template <class Tree>
class Sequence;
template <class Tree>
class Step;
template <class Tree>
class InFlight;
template <class Tree>
class Finished;
template <class Tree>
class StepView;
class AttentionPlan;
struct PlanView;
class LiveView;

struct KvGeometry;
struct KvCacheOptions;
template <class T>
struct KvView;
template <class Device, class T>
class KvCache;

class SerialExecutor;
class ThreadPool;
struct CpuOptions;
struct CudaOptions;

namespace detail {
struct AttentionAccess;  // debug/attention.hpp
struct ChunkAccess;      // detail/support/chunk_source.hpp
}  // namespace detail

CHUNKATTN_NAMESPACE_END
