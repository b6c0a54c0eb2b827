// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "cuda/unmodelled.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_set>

#include "common/environment.h"
#include "common/runtime_hooks.h"

namespace stand_in {
namespace {

constexpr int kStrictExit = 87;

thread_local int t_guard = 0;
thread_local const char* t_operator = "";

std::atomic<long> g_unmodelled{0};

}  // namespace

bool operator_computes() {
  return t_guard > 0;
}
const char* operator_at_work() {
  return t_operator;
}

void report_unmodelled(const char* what, const char* name, Severity severity) {
  g_unmodelled++;
  static std::mutex mutex;
  static auto* reported = new std::unordered_set<std::string>;
  std::lock_guard lock(mutex);
  if (!reported->insert(std::string(what) + name + t_operator).second)
    return;
  fprintf(stderr, "[fakecuda %d] %s %.300s (op %s)\n", getpid(), what, name, t_operator);
  if (severity == Severity::kError && knob("FAKE_CUDA_STRICT", 0)) {
    fflush(stderr);
    _exit(kStrictExit);
  }
}

}  // namespace stand_in

using namespace stand_in;

CUDA_API int fakecuda_guard(int change) {
  return t_guard += change;
}
CUDA_API void fakecuda_op(const char* name) {
  t_operator = name;
}
CUDA_API long fakecuda_lost() {
  return g_unmodelled;
}
