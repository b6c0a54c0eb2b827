// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// FAKE_NCCL_TRACE=1: each communicator's set-up, launches and end, on stderr. Read once.
#pragma once
#include <unistd.h>

#include <cstdio>

#include "common/environment.h"

namespace stand_in {

inline bool tracing() {
  static const bool tracing = knob("FAKE_NCCL_TRACE", 0);
  return tracing;
}

}  // namespace stand_in

#define NCCL_TRACE(format, ...)                                                           \
  do {                                                                                    \
    if (stand_in::tracing())                                                              \
      fprintf(stderr, "[fakenccl %d] " format "\n", getpid() __VA_OPT__(, ) __VA_ARGS__); \
  } while (0)
