// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Kernel launches. A kernel's code does not run here: the operators' CPU kernels compute instead
// (operators/boxed.cpp). Outside an operator only fills compute, which torch's own C++ launches,
// and every other kernel is reported.
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "common/environment.h"
#include "cuda/runtime_api.h"
#include "cuda/stream.h"
#include "cuda/unmodelled.h"

namespace stand_in {
namespace {

// The mangled names of kernels, by the host function that nvcc makes for each. torch's libraries
// register them while they are loaded.
std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}

struct LaunchConfiguration {
  dim3 grid;
  dim3 block;
  size_t shared_memory;
  void* stream;
};

thread_local LaunchConfiguration t_configuration;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// The element size of a fill kernel, by the type's letter in FillFunctor<type>; 0 for others.
int fill_width(const std::string& name) {
  if (!contains(name, "vectorized_elementwise_kernel"))
    return 0;
  for (const char* type : {"FillFunctorIf", "FillFunctorIi"}) {
    if (contains(name, type))
      return 4;
  }
  for (const char* type : {"FillFunctorIl", "FillFunctorId"}) {
    if (contains(name, type))
      return 8;
  }
  for (const char* type : {"FillFunctorIh", "FillFunctorIb", "FillFunctorIa"}) {
    if (contains(name, type))
      return 1;
  }
  return 0;
}

struct Kernel {
  std::string name;
  int fill_width;
};

const Kernel& kernel_of(const void* function) {
  static std::mutex mutex;
  static auto* kernels = new std::unordered_map<const void*, Kernel>;
  std::lock_guard lock(mutex);
  const auto known = kernels->find(function);
  if (known != kernels->end())
    return known->second;
  const auto named = kernel_names().find(function);
  const std::string name = named == kernel_names().end() ? "?" : named->second;
  const Kernel kernel{name, fill_width(name)};
  if (knob("FAKE_CUDA_KERNELS", 0))
    fprintf(stderr, "[fakecuda] kernel %s kind %d\n", name.c_str(), kernel.fill_width);
  return kernels->emplace(function, kernel).first->second;
}

// The work of a fill, whose arguments are the count, the value and the address.
Work fill(void** arguments, int width) {
  const int count = *static_cast<int*>(arguments[0]);
  uint64_t value = 0;
  memcpy(&value, arguments[1], width);
  char* address = *static_cast<char**>(arguments[2]);
  return [=] {
    for (int i = 0; i < count; i++)
      memcpy(address + static_cast<size_t>(i) * width, &value, width);
  };
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

CUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDA_API void __cudaUnregisterFatBinary(void**) {}
CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

CUDA_API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int,
                                     void*, void*, void*, void*, int*) {
  kernel_names()[function] = name ? name : "";
}

// kernel<<<grid, block, shared_memory, stream>>>(...) becomes a push, a pop in the kernel's host
// function, and a launch.

CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory,
                                              void* stream) {
  t_configuration = {grid, block, shared_memory, stream};
  return 0;
}

CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_memory,
                                                void* stream) {
  *grid = t_configuration.grid;
  *block = t_configuration.block;
  *shared_memory = t_configuration.shared_memory;
  *static_cast<void**>(stream) = t_configuration.stream;
  return cudaSuccess;
}

CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                      cudaStream_t stream) {
  if (operator_computes())
    return cudaSuccess;
  const Kernel& kernel = kernel_of(function);
  Work work = [] {};
  if (kernel.fill_width) {
    work = fill(arguments, kernel.fill_width);
  } else {
    report_unmodelled("a kernel outside a known op computes nothing:", kernel.name.c_str(),
                      Severity::kError);
  }
  std::lock_guard lock(stream_mutex());
  stream_of(stream)->enqueue(std::move(work));
  return cudaSuccess;
}

CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                        void** arguments, size_t shared_memory,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_memory, stream);
}

CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                         const void* function, void** arguments) {
  return cudaLaunchKernel(function, configuration->gridDim, configuration->blockDim, arguments, 0,
                          configuration->stream);
}

CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  cudaFuncAttributes a = {};
  a.maxThreadsPerBlock = 1024;
  a.numRegs = 32;
  a.ptxVersion = 90;
  a.binaryVersion = 90;
  *attributes = a;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                            const void*, int,
                                                                            size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
