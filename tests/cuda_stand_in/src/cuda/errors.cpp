// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/errors.h"

namespace stand_in {
namespace {

thread_local cudaError_t t_last_error = cudaSuccess;

}  // namespace

cudaError_t fail(cudaError_t error) {
  t_last_error = error;
  return error;
}

}  // namespace stand_in

using namespace stand_in;

CUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = t_last_error;
  t_last_error = cudaSuccess;
  return error;
}

CUDA_API cudaError_t cudaPeekAtLastError() {
  return t_last_error;
}

CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaErrorFake";
}

CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInitializationError:
      return "initialization error";
    default:
      return "fake error";
  }
}
