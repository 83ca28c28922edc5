// Products by oneDNN. It would use threads of OpenMP; here each thread of the pool calls it for a
// part of the outputs and tells OpenMP to stay on that thread.
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

Kernel make_kernel(std::size_t rows, const Matrix& matrix, std::size_t outputs) {
  using dnnl::memory;
  const auto size = [](std::size_t n) { return static_cast<memory::dim>(n); };
  const memory::dim stride = size(matrix.stride());
  const auto type =
      matrix.element() == Element::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  Kernel kernel;
  kernel.x = {{size(rows), stride}, type, memory::dims{stride, 1}};
  kernel.weights = {{stride, size(outputs)}, type, memory::dims{1, stride}};  // transposed
  kernel.out = {
      {size(rows), size(outputs)}, memory::data_type::f32, memory::dims{size(matrix.outputs()), 1}};
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

void onednn_product(const ProductCall& call, const std::uint16_t* rounded, std::size_t begin,
                    std::size_t end) {
  thread_local dnnl::stream stream = [] {
    omp_set_num_threads(1);  // of what this thread starts
    return dnnl::stream(engine());
  }();
  using Shape = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, Element>;
  thread_local std::map<Shape, Kernel> kernels;
  const Matrix& matrix = *call.weights;
  const std::size_t rows = row_room(call.rows);
  const Shape shape{rows, matrix.inputs(), matrix.outputs(), end - begin, matrix.element()};
  auto found = kernels.find(shape);
  if (found == kernels.end())
    found = kernels.emplace(shape, make_kernel(rows, matrix, end - begin)).first;
  Kernel& kernel = found->second;
  const bool fp32 = matrix.element() == Element::fp32;
  const void* x = fp32 ? static_cast<const void*>(call.x) : rounded;
  const void* weights = fp32 ? static_cast<const void*>(matrix.fp32() + begin * matrix.stride())
                             : matrix.bf16() + begin * matrix.stride();
  kernel.product.execute(
      stream, {{DNNL_ARG_SRC, {kernel.x, engine(), const_cast<void*>(x)}},
               {DNNL_ARG_WEIGHTS, {kernel.weights, engine(), const_cast<void*>(weights)}},
               {DNNL_ARG_DST, {kernel.out, engine(), call.out + begin}},
               {DNNL_ARG_SCRATCHPAD, kernel.scratchpad}});
  stream.wait();
}

}  // namespace serve::detail
