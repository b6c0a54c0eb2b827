// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Events: a position in a stream.
#include <chrono>
#include <mutex>

#include "cuda/host_wait.h"
#include "cuda/stream.h"

namespace stand_in {
namespace {

struct Event {
  Stream* stream = nullptr;  // null before the first record
  uint64_t position = 0;
  bool has_time = false;
  double seconds = 0;

  bool reached() const { return !stream || stream->reached(position); }
  void want() const {
    if (stream)
      stream->want(position);
  }
};

Event* event_of(cudaEvent_t handle) {
  return reinterpret_cast<Event*>(handle);
}

// Wait for the position that was recorded by now: a later record of the event changes nothing.
void wait_for_event(const Event& recorded, std::unique_lock<std::mutex>& lock) {
  recorded.want();
  stream_changed().wait(lock, [&] { return recorded.reached(); });
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event;
  event->has_time = !(flags & cudaEventDisableTiming);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, 0);
}

// The event's memory stays: its stream may have yet to write the time.
CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
  std::lock_guard lock(stream_mutex());
  Event* event = event_of(handle);
  event->stream = stream_of(stream);
  if (event->has_time) {
    event->stream->enqueue([event] {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      event->seconds = std::chrono::duration<double>(now).count();
    });
  }
  event->position = event->stream->position();
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  std::lock_guard lock(stream_mutex());
  return event_of(handle)->reached() ? cudaSuccess : cudaErrorNotReady;
}

CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  HostWait wait("cudaEventSynchronize");
  count_sync();
  std::unique_lock lock(stream_mutex());
  const Event recorded = *event_of(handle);
  wait_for_event(recorded, lock);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = static_cast<float>(1000 * (event_of(end)->seconds - event_of(begin)->seconds));
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  std::lock_guard lock(stream_mutex());
  const Event recorded = *event_of(event);
  Stream* stream = stream_of(handle);
  if (!recorded.stream || recorded.stream == stream)
    return cudaSuccess;
  stream->enqueue([recorded] {
    std::unique_lock lock(stream_mutex());
    wait_for_event(recorded, lock);
  });
  return cudaSuccess;
}
