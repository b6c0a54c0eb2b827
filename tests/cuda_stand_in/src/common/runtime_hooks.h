// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Functions of the stand-in's libcudart beyond CUDA's own, for its NCCL, its operators and tests.
//
// Tests reach them by ctypes: `ctypes.CDLL("libcudart.so.13").fakecuda_enqueue(...)`.
#pragma once
#include <cstdint>

#include "cuda/runtime_api.h"

// Put a work into a stream. A null stream is the default stream of the device.
CUDA_API void fakecuda_enqueue(cudaStream_t stream, void (*work)(void*), void* argument);
CUDA_API void fakecuda_enqueue_on(int device, cudaStream_t stream, void (*work)(void*),
                                  void* argument);

// Wait until the works that the stream, or any stream of the thread's device, has by now are done.
CUDA_API void fakecuda_sync_on(int device, cudaStream_t stream);
CUDA_API void fakecuda_sync_device();

// While a thread's guard is positive, its kernels, its copies within the device and its memsets do
// nothing: an operator is at work whose result the CPU's kernel computes. Returns the new guard.
CUDA_API int fakecuda_guard(int change);
// Name the operator that is at work, for reports.
CUDA_API void fakecuda_op(const char* name);

// The works of a stream that are not done.
CUDA_API uint64_t fakecuda_pending(cudaStream_t stream);
// How often the host waited for the device, and how many works nothing computes.
CUDA_API long fakecuda_syncs();
CUDA_API long fakecuda_lost();
