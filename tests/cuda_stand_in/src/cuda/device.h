// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Devices, and the process that CUDA was initialized in.
#pragma once
#include "cuda/runtime_api.h"

namespace stand_in {

constexpr size_t kDeviceMemory = 80ull << 30;

// The device that the calling thread works on: each thread begins on device 0, as with CUDA.
int current_device();

// Makes a device the calling thread's, for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();

 private:
  const int before_;
};

}  // namespace stand_in
