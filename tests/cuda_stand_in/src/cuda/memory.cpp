// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "common/environment.h"
#include "cuda/device.h"
#include "cuda/errors.h"
#include "cuda/host_wait.h"
#include "cuda/runtime_api.h"
#include "cuda/stream.h"

namespace stand_in {
namespace {

std::mutex g_blocks_mutex;

std::map<uintptr_t, Block>& blocks() {
  static auto* blocks = new std::map<uintptr_t, Block>;
  return *blocks;
}

std::atomic<size_t> g_device_bytes_in_use{0};

uintptr_t key_of(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

void add_block(void* address, size_t bytes, MemoryKind kind) {
  std::lock_guard lock(g_blocks_mutex);
  blocks()[key_of(address)] = {bytes, kind, current_device()};
}

// Forget the block that begins at the address.
std::optional<Block> remove_block(void* address) {
  std::lock_guard lock(g_blocks_mutex);
  const auto found = blocks().find(key_of(address));
  if (found == blocks().end())
    return std::nullopt;
  const Block block = found->second;
  blocks().erase(found);
  return block;
}

void* allocate(size_t bytes, MemoryKind kind) {
  const size_t size = bytes ? bytes : 1;
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED)
    return nullptr;
  add_block(address, size, kind);
  return address;
}

std::optional<Block> release(void* address) {
  const std::optional<Block> block = remove_block(address);
  if (block)
    munmap(address, block->bytes);
  return block;
}

size_t size_of_block(const void* address) {
  const std::optional<Block> block = find_block(address);
  return block ? block->bytes : 0;
}

// Pinning and unpinning take time in proportion to the size (FAKE_PIN_MS_PER_MB): the kernel works
// through the pages. Gigabytes took seconds, in which Python stood still where the caller kept the
// GIL (torch.accelerator.empty_host_cache) or a lock (CachingHostAllocator::free_from_pool).
void take_time_for_pages(size_t bytes) {
  const long ms = static_cast<long>(knob("FAKE_PIN_MS_PER_MB", 0)) * static_cast<long>(bytes >> 20);
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

// A host with a limit on pinned memory (FAKE_PIN_MOST_MB) refuses a larger block.
bool refuses_to_pin(size_t bytes) {
  const size_t most = knob("FAKE_PIN_MOST_MB", 0);
  return most && bytes > most << 20;
}

}  // namespace

std::optional<Block> find_block(const void* address) {
  std::lock_guard lock(g_blocks_mutex);
  auto after = blocks().upper_bound(key_of(address));
  if (after == blocks().begin())
    return std::nullopt;
  const auto& [begin, block] = *--after;
  if (key_of(address) >= begin + block.bytes)
    return std::nullopt;
  return block;
}

}  // namespace stand_in

using namespace stand_in;

CUDA_API cudaError_t cudaMalloc(void** address, size_t bytes) {
  *address = allocate(bytes, MemoryKind::kDevice);
  if (!*address)
    return fail(cudaErrorMemoryAllocation);
  g_device_bytes_in_use += size_of_block(*address);
  return cudaSuccess;
}

// cudaFree waits for the whole device ("Implicit Synchronization" in CUDA's guide). A thread that
// empties torch's cache therefore waits for an exchange of another thread.
CUDA_API cudaError_t cudaFree(void* address) {
  HostWait wait("cudaFree");
  if (!address)
    return cudaSuccess;
  wait_for_device(current_device());
  const std::optional<Block> block = release(address);
  if (block)
    g_device_bytes_in_use -= block->bytes;
  return cudaSuccess;
}

// torch's default allocator does not use stream-ordered memory; its blocks are never given back.

CUDA_API cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) {
  return cudaMalloc(address, bytes);
}

CUDA_API cudaError_t cudaFreeAsync(void*, cudaStream_t) {
  return cudaSuccess;
}

CUDA_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = kDeviceMemory;
  *free = kDeviceMemory - g_device_bytes_in_use;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  HostWait wait("cudaHostAlloc", bytes);
  if (refuses_to_pin(bytes))
    return fail(cudaErrorMemoryAllocation);
  take_time_for_pages(bytes);
  *address = allocate(bytes, MemoryKind::kPinned);
  return *address ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

// Unpinning waits for the whole device, as cudaFree does: a copy may still use the memory.
CUDA_API cudaError_t cudaFreeHost(void* address) {
  const size_t bytes = size_of_block(address);
  HostWait wait("cudaFreeHost", bytes);
  take_time_for_pages(bytes);
  wait_for_device(current_device());
  release(address);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  HostWait wait("cudaHostRegister", bytes);
  if (refuses_to_pin(bytes))
    return fail(cudaErrorMemoryAllocation);
  take_time_for_pages(bytes);
  add_block(address, bytes, MemoryKind::kPinned);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaHostUnregister(void* address) {
  const size_t bytes = size_of_block(address);
  HostWait wait("cudaHostUnregister", bytes);
  take_time_for_pages(bytes);
  wait_for_device(current_device());
  remove_block(address);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                              const void* address) {
  cudaPointerAttributes a = {};
  a.type = cudaMemoryTypeUnregistered;
  a.device = -1;
  const std::optional<Block> block = find_block(address);
  if (block) {
    const bool pinned = block->kind == MemoryKind::kPinned;
    a.type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a.device = block->device;
    a.devicePointer = const_cast<void*>(address);
    a.hostPointer = pinned ? a.devicePointer : nullptr;
  }
  *attributes = a;
  return cudaSuccess;
}
