// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/host_wait.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "common/environment.h"
#include "common/runtime_hooks.h"

namespace stand_in {
namespace {

constexpr size_t kLargeBlock = 1 << 20;

std::atomic<long> g_syncs{0};

}  // namespace

HostWait::HostWait(const char* call, size_t bytes)
    : call_(call), bytes_(bytes), begin_(std::chrono::steady_clock::now()) {}

HostWait::~HostWait() {
  const int limit = knob("FAKE_CUDA_SLOW", 0);
  if (!limit)
    return;
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin_;
  if (taken.count() < limit && bytes_ < kLargeBlock)
    return;
  char thread[32] = "";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  fprintf(stderr, "[fakecuda %d.%03ld pid %d tid %d %s] %s took %.0f ms, %zu bytes\n",
          static_cast<int>(now.tv_sec % 100000), now.tv_nsec / 1000000, getpid(), gettid(), thread,
          call_, taken.count(), bytes_);
}

void count_sync() {
  g_syncs++;
}

}  // namespace stand_in

CUDA_API long fakecuda_syncs() {
  return stand_in::g_syncs;
}
