// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/stream.h"

#include <pthread.h>

#include <chrono>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "common/runtime_hooks.h"
#include "cuda/device.h"
#include "cuda/host_wait.h"
#include "cuda/lazy.h"

namespace stand_in {
namespace {

// Read once, at the first work. The objects below are never destroyed, for the reason above.

const Late& late() {
  static const auto* late = new Late;
  return *late;
}

const Lazy& lazy() {
  static const auto* lazy = new Lazy;
  return *lazy;
}

std::vector<Stream*>& all_streams() {
  static auto* streams = new std::vector<Stream*>;
  return *streams;
}

std::map<int, Stream*>& default_streams() {
  static auto* streams = new std::map<int, Stream*>;
  return *streams;
}

// A stream outlives its handle: events that were recorded on it may still be asked.
Stream* make_stream(int device, int priority, bool is_default) {
  const int id = static_cast<int>(all_streams().size());
  auto* stream = new Stream(id, device, priority, is_default);
  all_streams().push_back(stream);
  return stream;
}

}  // namespace

std::mutex& stream_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::condition_variable& stream_changed() {
  static auto* condition = new std::condition_variable;
  return *condition;
}

Stream::Stream(int id, int device, int priority, bool is_default)
    : id(id), device(device), priority(priority), is_default(is_default) {}

void Stream::enqueue(Work work) {
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { run(); }).detach();
  }
  queue_.push_back(std::move(work));
  enqueued_++;
  stream_changed().notify_all();
}

void Stream::want(uint64_t position) {
  if (lazy().ms && wanted_ < position) {
    wanted_ = position;
    stream_changed().notify_all();
  }
}

void Stream::run() {
  pthread_setname_np(pthread_self(), "fakecuda");
  delays_.emplace(late(), id, is_default);
  std::unique_lock lock(stream_mutex());
  for (;;) {
    await_begin(lock);
    Work work = std::move(queue_.front());
    queue_.pop_front();
    const auto delay = std::chrono::microseconds(delays_->draw(was_idle_));
    was_idle_ = false;
    lock.unlock();
    if (delay.count())
      std::this_thread::sleep_for(delay);
    work();
    lock.lock();
    finished_++;
    stream_changed().notify_all();
  }
}

// Wait until there is a work that may begin.
void Stream::await_begin(std::unique_lock<std::mutex>& lock) {
  if (queue_.empty())
    was_idle_ = true;
  stream_changed().wait(lock, [this] { return !queue_.empty(); });
  if (!lazy().ms)
    return;
  const auto may_begin = [this] { return wanted_ > finished_ || lazy().begins(id, finished_); };
  const auto longest = std::chrono::milliseconds(lazy().ms);
  if (!stream_changed().wait_for(lock, longest, may_begin))
    wanted_ = enqueued_;
}

Stream* stream_of(cudaStream_t handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  const bool is_default = number <= 2;  // null, cudaStreamLegacy and cudaStreamPerThread
  if (!is_default)
    return reinterpret_cast<Stream*>(handle);
  Stream*& stream = default_streams()[current_device()];
  if (!stream)
    stream = make_stream(current_device(), 0, true);
  return stream;
}

void wait_for_stream(Stream* stream, std::unique_lock<std::mutex>& lock) {
  const uint64_t position = stream->position();
  stream->want(position);
  stream_changed().wait(lock, [=] { return stream->reached(position); });
}

void wait_for_device(int device) {
  std::unique_lock lock(stream_mutex());
  std::vector<std::pair<Stream*, uint64_t>> waited_for;
  for (Stream* stream : all_streams()) {
    if (stream->device != device)
      continue;
    stream->want(stream->position());
    waited_for.emplace_back(stream, stream->position());
  }
  stream_changed().wait(lock, [&] {
    for (const auto& [stream, position] : waited_for) {
      if (!stream->reached(position))
        return false;
    }
    return true;
  });
}

}  // namespace stand_in

using namespace stand_in;

CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  std::lock_guard lock(stream_mutex());
  Stream* stream = make_stream(current_device(), priority, false);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, 0, 0);
}

CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  if (lowest)
    *lowest = 0;
  if (highest)
    *highest = -5;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  std::lock_guard lock(stream_mutex());
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  return stream_of(handle)->pending() == 0 ? cudaSuccess : cudaErrorNotReady;
}

CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  HostWait wait("cudaStreamSynchronize");
  count_sync();
  std::unique_lock lock(stream_mutex());
  wait_for_stream(stream_of(handle), lock);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceSynchronize() {
  HostWait wait("cudaDeviceSynchronize");
  count_sync();
  wait_for_device(current_device());
  return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  std::lock_guard lock(stream_mutex());
  stream_of(handle)->enqueue([=] { function(data); });
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function,
                                           void* data, unsigned) {
  std::lock_guard lock(stream_mutex());
  stream_of(handle)->enqueue([=] { function(handle, cudaSuccess, data); });
  return cudaSuccess;
}

// Graphs are not modelled: no stream is ever captured.

CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t*,
                                              const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id)
    *id = 0;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

CUDA_API void fakecuda_enqueue(cudaStream_t handle, void (*work)(void*), void* argument) {
  std::lock_guard lock(stream_mutex());
  stream_of(handle)->enqueue([=] { work(argument); });
}

CUDA_API void fakecuda_enqueue_on(int device, cudaStream_t handle, void (*work)(void*),
                                  void* argument) {
  DeviceScope scope(device);
  fakecuda_enqueue(handle, work, argument);
}

CUDA_API void fakecuda_sync_on(int device, cudaStream_t handle) {
  DeviceScope scope(device);
  std::unique_lock lock(stream_mutex());
  wait_for_stream(stream_of(handle), lock);
}

CUDA_API void fakecuda_sync_device() {
  wait_for_device(current_device());
}

CUDA_API uint64_t fakecuda_pending(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  return stream_of(handle)->pending();
}
