// The smallest program that sees the library through nvcc: host and device code share its types.
#include <chunkattn/chunkattn.hpp>
#include <cstdio>

__global__ void visible_kernel(chunkattn::Piece piece, int kv_len, int* out) {
  *out = chunkattn::visible_length(piece, kv_len);
}

int main() {
  int devices = 0;
  const bool device = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  int result = chunkattn::visible_length({0, 0, 4, 0}, 3);
  if (device) {
    int* out = nullptr;
    if (cudaMallocManaged(&out, sizeof *out) != cudaSuccess) return 1;
    visible_kernel<<<1, 1>>>({0, 0, 4, 0}, 3, out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    result = *out;
    cudaFree(out);
  }
  std::printf("%s: %d of 4 tokens visible\n", device ? "device" : "host, no device", result);
  return result == 3 ? 0 : 1;
}
