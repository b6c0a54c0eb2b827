// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// The error that CUDA keeps for a thread.
#pragma once
#include "cuda/runtime_api.h"

namespace stand_in {

// Keep an error until the thread reads it. CUDA keeps the error of a refused call: a caller that
// only looks at the result leaves it behind, and torch's next kernel launch of that thread raises
// it (C10_CUDA_KERNEL_LAUNCH_CHECK reads cudaGetLastError).
cudaError_t fail(cudaError_t error);

}  // namespace stand_in
