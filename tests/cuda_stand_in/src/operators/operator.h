// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// An operator that the stand-in computes.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "operators/cuda_only.h"

namespace stand_in {

enum class Mode {
  // The CPU's kernel runs in the current stream, so the result is as late as the stream.
  kInStream,
  // The host needs the shape or the value (nonzero, equal): it waits for the stream, as CUDA does.
  kAtOnce,
  // As kInStream where all tensors are on the device. Else the original operator copies, by
  // cudaMemcpyAsync.
  kCopy,
};

struct Operator {
  c10::OperatorHandle handle;
  // torch's own kernel for CUDA.
  c10::SafeKernelFunction original;
  Mode mode;
  bool is_random;
  // Null where the CPU has the operator.
  const CudaOnlyKernel* cuda_only;
  std::string name;
  // The index of its argument `generator`; -1 without one.
  int generator_argument;
};

void add_operator(const c10::OperatorName& name, Operator added);

// The kernel that torch calls for every operator of the stand-in.
void call_operator(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

}  // namespace stand_in
