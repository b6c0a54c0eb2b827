// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Functions of the driver that torch asks the runtime for by name (c10/cuda/driver_api.cpp).
#include <dlfcn.h>

#include "cuda/runtime_api.h"

namespace {

constexpr int kUnknownError = 999;

int unsupported() {
  return kUnknownError;
}

}  // namespace

CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                      unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function)
    *function = reinterpret_cast<void*>(unsupported);
  if (result)
    *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
