// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/device.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "common/environment.h"

namespace stand_in {
namespace {

thread_local int t_device = 0;

// The process that initialized CUDA; 0 before.
std::atomic<int> g_initialized_by{0};

int count_visible(const std::string& devices) {
  int count = 0;
  size_t begin = 0;
  while (begin < devices.size()) {
    size_t end = devices.find(',', begin);
    if (end == std::string::npos)
      end = devices.size();
    if (end > begin)
      count++;
    begin = end + 1;
  }
  return count;
}

// Read once: CUDA, too, ignores a later change of CUDA_VISIBLE_DEVICES.
int device_count() {
  static const int count = [] {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible ? count_visible(visible) : knob("FAKE_CUDA_DEVICES", 2);
  }();
  return count;
}

// Initialize CUDA if nobody has, and report whether it works in this process.
//
// CUDA does not survive a fork: a child of a process that initialized it gets errors for good
// (torch.cuda._lazy_init: "Cannot re-initialize CUDA in forked subprocess"). The zygote must
// therefore fork its workers before anything calls CUDA.
bool initialize(const char* caller) {
  int owner = 0;
  if (g_initialized_by.compare_exchange_strong(owner, getpid())) {
    if (knob("FAKE_CUDA_TRACE", 0)) {
      const char* connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
      fprintf(stderr, "[fakecuda pid %d] cuInit by %s, CUDA_DEVICE_MAX_CONNECTIONS=%s\n", getpid(),
              caller, connections ? connections : "(unset)");
    }
    return true;
  }
  if (owner == getpid())
    return true;
  static std::atomic<bool> reported{false};
  if (!reported.exchange(true)) {
    fprintf(stderr, "[fakecuda pid %d] POISONED: initialized before the fork by pid %d (%s)\n",
            getpid(), owner, caller);
  }
  return false;
}

}  // namespace

int current_device() {
  return t_device;
}

DeviceScope::DeviceScope(int device) : before_(t_device) {
  t_device = device;
}
DeviceScope::~DeviceScope() {
  t_device = before_;
}

}  // namespace stand_in

using namespace stand_in;

CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  if (!initialize("cudaGetDeviceCount")) {
    *count = 0;
    return cudaErrorInitializationError;
  }
  *count = device_count();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

CUDA_API cudaError_t cudaSetDevice(int device) {
  if (!initialize("cudaSetDevice"))
    return cudaErrorInitializationError;
  if (device < 0 || device >= device_count())
    return cudaErrorInvalidDevice;
  t_device = device;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaGetDevice(int* device) {
  const bool works = initialize("cudaGetDevice");
  *device = t_device;
  return works ? cudaSuccess : cudaErrorInitializationError;
}

// The figures of an H100: torch chooses grid sizes and code paths (flash attention) by them.

CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 233472;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  cudaDeviceProp p = {};
  snprintf(p.name, sizeof p.name, "NVIDIA H100 80GB HBM3");
  p.totalGlobalMem = kDeviceMemory;
  p.major = 9;
  p.multiProcessorCount = 132;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.regsPerBlock = 65536;
  p.regsPerMultiprocessor = 65536;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = 65535;
  p.maxGridSize[2] = 65535;
  p.maxThreadsDim[0] = 1024;
  p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.l2CacheSize = 50 << 20;
  p.unifiedAddressing = 1;
  p.pciBusID = device + 1;
  p.memoryBusWidth = 5120;
  *properties = p;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
