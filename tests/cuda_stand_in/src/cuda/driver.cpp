// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// libcuda: what torch asks the driver for. Its other functions report that they are not supported.
#include "cuda/runtime_api.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;

}  // namespace

CUDA_API int cuInit(unsigned) {
  return kSuccess;
}

CUDA_API int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

CUDA_API int cuCtxGetCurrent(void** context) {
  static int only_context;
  *context = &only_context;
  return kSuccess;
}

// torch looks for a device's context before it opens one (at::cuda::detail::hasPrimaryContext).
CUDA_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags)
    *flags = 0;
  *active = 1;
  return kSuccess;
}

CUDA_API int cuGetErrorString(int, const char** text) {
  *text = "fake";
  return kSuccess;
}

CUDA_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}

CUDA_API int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return kSuccess;
}

CUDA_API int cuPointerGetAttribute(void*, int, unsigned long long) {
  return kInvalidValue;
}
