// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Streams: each is a thread that carries out its works in order.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "cuda/late.h"
#include "cuda/runtime_api.h"

namespace stand_in {

using Work = std::function<void()>;

// One lock for all streams and events. Neither it nor the condition is ever destroyed, because
// streams still run while the process ends.
std::mutex& stream_mutex();
// Notified at each change of a stream.
std::condition_variable& stream_changed();

class Stream {
 public:
  Stream(int id, int device, int priority, bool is_default);

  const int id;
  const int device;
  const int priority;
  const bool is_default;

  // The functions below need stream_mutex().

  void enqueue(Work work);
  // The number of works up to now: the position that an event records.
  uint64_t position() const { return enqueued_; }
  bool reached(uint64_t position) const { return finished_ >= position; }
  uint64_t pending() const { return enqueued_ - finished_; }
  // Somebody waits for the works up to this position (FAKE_CUDA_LAZY).
  void want(uint64_t position);

 private:
  void run();
  void await_begin(std::unique_lock<std::mutex>& lock);

  std::deque<Work> queue_;
  uint64_t enqueued_ = 0;
  uint64_t finished_ = 0;
  uint64_t wanted_ = 0;
  bool has_thread_ = false;
  bool was_idle_ = true;
  // Made with the thread: a fork between the two gives each process a sequence of its own.
  std::optional<Delays> delays_;
};

// The stream of a handle. Null and CUDA's two special handles are the device's default stream: all
// of them are one stream here, as in torch, which uses the legacy default stream only.
Stream* stream_of(cudaStream_t handle);

// Wait for the works that the stream has by now.
void wait_for_stream(Stream* stream, std::unique_lock<std::mutex>& lock);
// Wait for the works that all streams of the device have by now.
void wait_for_device(int device);

}  // namespace stand_in
