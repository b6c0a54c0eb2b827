// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// libcublas: handles and versions. The products themselves are the operators' CPU kernels.
#include "cuda/runtime_api.h"

CUDA_API int cublasCreate_v2(void** handle) {
  static char only_handle[64];
  *handle = only_handle;
  return 0;
}

CUDA_API int cublasGetVersion_v2(void*, int* version) {
  *version = 130100;
  return 0;
}

CUDA_API int cublasGetStream_v2(void*, void** stream) {
  *stream = nullptr;
  return 0;
}

CUDA_API int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}

CUDA_API int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
