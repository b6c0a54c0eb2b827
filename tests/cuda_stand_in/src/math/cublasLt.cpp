// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// libcublasLt: torch multiplies with it where a bias is added, and wants one algorithm at least.
#include <cstring>

#include "cuda/runtime_api.h"

constexpr size_t kAlgorithmResultBytes = 64;

CUDA_API int cublasLtCreate(void** handle) {
  static char only_handle[64];
  *handle = only_handle;
  return 0;
}

CUDA_API size_t cublasLtGetVersion() {
  return 130100;
}

CUDA_API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*,
                                            int requested, char* results, int* found) {
  *found = requested > 0;
  memset(results, 0, kAlgorithmResultBytes);
  return 0;
}
