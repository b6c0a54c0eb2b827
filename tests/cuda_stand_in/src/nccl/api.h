// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// The declarations of NCCL 2.29 that the stand-in needs, written by hand from its documentation.
#pragma once
#include <cstddef>

#include "cuda/runtime_api.h"

#define NCCL_API extern "C" __attribute__((visibility("default")))

constexpr int kNcclVersion = 22907;

typedef struct ncclComm* ncclComm_t;
typedef int ncclRedOp_t;
typedef int ncclScalarResidence_t;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};

enum ncclDataType_t {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
};

enum {
  ncclSum,
  ncclProd,
  ncclMax,
  ncclMin,
  ncclAvg,
};

// The beginning of NCCL's struct; the rest is not read.
struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

NCCL_API ncclResult_t ncclGroupStart();
NCCL_API ncclResult_t ncclGroupEnd();
