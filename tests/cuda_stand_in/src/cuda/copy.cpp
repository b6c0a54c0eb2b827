// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Copies and memsets.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cuda/host_wait.h"
#include "cuda/memory.h"
#include "cuda/runtime_api.h"
#include "cuda/stream.h"
#include "cuda/unmodelled.h"

namespace stand_in {
namespace {

enum class Place { kDevice, kPinned, kPageable };

Place place_of(const void* address) {
  const std::optional<Block> block = find_block(address);
  if (!block)
    return Place::kPageable;
  return block->kind == MemoryKind::kDevice ? Place::kDevice : Place::kPinned;
}

void enqueue(cudaStream_t handle, Work work) {
  std::lock_guard lock(stream_mutex());
  stream_of(handle)->enqueue(std::move(work));
}

void wait_for(cudaStream_t handle) {
  std::unique_lock lock(stream_mutex());
  wait_for_stream(stream_of(handle), lock);
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

// As CUDA's "API synchronization behavior" has it: a copy between the device and pinned memory is
// asynchronous; one from pageable memory has read its source when the call returns; one to pageable
// memory is over when the call returns. A `non_blocking` copy to pageable memory blocks, therefore.
CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                     cudaStream_t stream) {
  const Place target = place_of(to);
  const Place source = place_of(from);
  if (operator_computes() && source == Place::kDevice) {
    if (target == Place::kDevice)
      return cudaSuccess;
    report_unmodelled(
        "the host reads device memory inside an op that is computed later (right if it is an "
        "input):",
        operator_at_work(), Severity::kNote);
  }
  if (source == Place::kPageable) {
    void* staged = malloc(bytes ? bytes : 1);
    memcpy(staged, from, bytes);
    enqueue(stream, [=] {
      memcpy(to, staged, bytes);
      free(staged);
    });
    return cudaSuccess;
  }
  enqueue(stream, [=] { memcpy(to, from, bytes); });
  if (target == Place::kPageable) {
    HostWait wait("cudaMemcpyAsync to pageable");
    count_sync();
    wait_for(stream);
  }
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t result = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  HostWait wait("cudaMemcpy");
  count_sync();
  wait_for(nullptr);
  return result;
}

CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                         cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

// Constants of kernels that do not run.
CUDA_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

CUDA_API cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char variables[1 << 16];
  *address = variables;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (operator_computes())
    return cudaSuccess;
  enqueue(stream, [=] { memset(to, value, bytes); });
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
