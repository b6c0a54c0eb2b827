// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// libcudnn: its version, which torch compares while it is imported.
#include "cuda/runtime_api.h"

CUDA_API size_t cudnnGetVersion() {
  return 92000;
}
