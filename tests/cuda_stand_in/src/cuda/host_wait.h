// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Reports of calls in which the host waits for the device, or for the driver.
#pragma once
#include <chrono>
#include <cstddef>

namespace stand_in {

// Lives as long as a call that may wait. Under FAKE_CUDA_SLOW=MS a call that takes longer, or that
// concerns 1 MB or more of memory, is named on stderr with its thread.
class HostWait {
 public:
  explicit HostWait(const char* call, size_t bytes = 0);
  ~HostWait();

 private:
  const char* const call_;
  const size_t bytes_;
  const std::chrono::steady_clock::time_point begin_;
};

// Count a wait of the host for the device (fakecuda_syncs).
void count_sync();

}  // namespace stand_in
