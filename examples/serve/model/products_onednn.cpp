// Products by oneDNN. It would use threads of OpenMP; here each thread of the pool calls it for a
// part of the outputs and makes OpenMP stay on that thread.
#include <omp.h>

#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>

#include "products.hpp"

namespace serve::detail {

namespace {

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

/// What a thread keeps of one shape: code, and memory for the call to work in.
struct Kernel {
  dnnl::memory::desc x, weights, out;
  dnnl::matmul product;
  dnnl::memory scratchpad;
};

Kernel make_kernel(const ProductCall& call) {
  using dnnl::memory;
  const auto size = [](std::size_t n) { return static_cast<memory::dim>(n); };
  const memory::dim rows = size(call.rows), stride = size(call.inputs);
  const memory::dim outputs = size(call.outputs);
  const auto type =
      call.element == Element::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  Kernel kernel;
  kernel.x = {{rows, stride}, type, memory::dims{stride, 1}};
  kernel.weights = {{stride, outputs}, type, memory::dims{1, stride}};  // transposed
  kernel.out = {{rows, outputs}, memory::data_type::f32, memory::dims{size(call.out_stride), 1}};
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR < 3
  const dnnl::matmul::primitive_desc description(
      dnnl::matmul::desc(kernel.x, kernel.weights, kernel.out), attributes, engine());
#else
  const dnnl::matmul::primitive_desc description(engine(), kernel.x, kernel.weights, kernel.out,
                                                 attributes);
#endif
  kernel.product = dnnl::matmul(description);
  kernel.scratchpad = memory(description.scratchpad_desc(), engine());
  return kernel;
}

}  // namespace

void onednn_product(const ProductCall& call) {
  thread_local dnnl::stream stream = [] {
    omp_set_num_threads(1);  // of what this thread starts
    return dnnl::stream(engine());
  }();
  using Shape = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, Element>;
  thread_local std::map<Shape, Kernel> kernels;
  const Shape shape{call.rows, call.inputs, call.outputs, call.out_stride, call.element};
  auto found = kernels.find(shape);
  if (found == kernels.end()) found = kernels.emplace(shape, make_kernel(call)).first;
  Kernel& kernel = found->second;
  kernel.product.execute(
      stream, {{DNNL_ARG_SRC, {kernel.x, engine(), const_cast<void*>(call.x)}},
               {DNNL_ARG_WEIGHTS, {kernel.weights, engine(), const_cast<void*>(call.weights)}},
               {DNNL_ARG_DST, {kernel.out, engine(), call.out}},
               {DNNL_ARG_SCRATCHPAD, kernel.scratchpad}});
  stream.wait();
}

}  // namespace serve::detail
