// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// libnvidia-ml: torch counts devices with it, so that a process can fork afterwards
// (torch.cuda._device_count_nvml under PYTORCH_NVML_BASED_CUDA_CHECK=1).
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <thread>

#include "common/environment.h"
#include "cuda/runtime_api.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;

// As NVML of driver 580 does: a process that has asked it has a thread more, and makes no fork.
void start_thread() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread waits([] {
      while (true) {
        pause();
      }
    });
    pthread_setname_np(waits.native_handle(), "cuda00001c00008");
    waits.detach();
  });
}

}  // namespace

CUDA_API int nvmlInit_v2() {
  start_thread();
  return kSuccess;
}
CUDA_API int nvmlInit() {
  start_thread();
  return kSuccess;
}
CUDA_API int nvmlInitWithFlags(unsigned) {
  start_thread();
  return kSuccess;
}
CUDA_API int nvmlShutdown() {
  return kSuccess;
}
CUDA_API const char* nvmlErrorString(int) {
  return "fake";
}

CUDA_API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = stand_in::knob("FAKE_CUDA_DEVICES", 2);
  return kSuccess;
}

CUDA_API int nvmlDeviceGetCount(unsigned* count) {
  return nvmlDeviceGetCount_v2(count);
}

CUDA_API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = reinterpret_cast<void*>(static_cast<size_t>(index) + 1);
  return kSuccess;
}

CUDA_API int nvmlDeviceGetHandleByIndex(unsigned index, void** handle) {
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

CUDA_API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) {
  *handle = reinterpret_cast<void*>(1);
  return kSuccess;
}

CUDA_API int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  snprintf(text, size, "GPU-%08zx-0000-0000-0000-000000000000", reinterpret_cast<size_t>(handle));
  return kSuccess;
}

CUDA_API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}

// No NVLink, no fabric, and no other process on the device.
CUDA_API int nvmlDeviceGetNvLinkRemoteDeviceType() {
  return kNotSupported;
}
CUDA_API int nvmlDeviceGetNvLinkRemotePciInfo_v2() {
  return kNotSupported;
}
CUDA_API int nvmlDeviceGetComputeRunningProcesses() {
  return kNotSupported;
}
CUDA_API int nvmlDeviceGetGpuFabricInfoV() {
  return kNotSupported;
}
