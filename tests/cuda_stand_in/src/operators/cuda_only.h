// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Operators that only CUDA has: their CPU kernels are written out here.
#pragma once
#include <ATen/core/stack.h>

#include <functional>
#include <string>

#include "operators/random.h"

namespace stand_in {

// Takes the operator's arguments, as CPU tensors, from the stack and leaves its results there. A
// result that is absent or None stays what the original operator's host code made it.
using CudaOnlyKernel = std::function<void(torch::jit::Stack&, const PhiloxState&)>;

// The kernel of an operator, or null.
const CudaOnlyKernel* find_cuda_only(const std::string& name);

}  // namespace stand_in
