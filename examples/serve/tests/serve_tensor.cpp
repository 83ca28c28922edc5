// serve_tensor FILE.gguf NAME: the tensor as floats, on stdout; for check/architectures.py.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "model/dequantise.hpp"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const serve::Gguf gguf(argv[1]);
    const serve::Tensor& tensor = gguf.tensor(argv[2], 64, 1024);
    std::vector<float> row(tensor.inputs);
    for (std::size_t o = 0; o < tensor.outputs; ++o) {
      serve::dequantise(tensor, o, row);
      std::fwrite(row.data(), sizeof(float), row.size(), stdout);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
