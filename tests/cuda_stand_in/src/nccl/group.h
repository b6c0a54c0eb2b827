// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Calls between ncclGroupStart and ncclGroupEnd take effect at the end of the group.
#pragma once
#include <functional>

#include "nccl/api.h"

namespace stand_in {

// One side of a message between two ranks.
struct Message {
  enum class Side { kSend, kReceive };

  ncclComm_t communicator;
  Side side;
  int peer;
  char* memory;
  size_t bytes;
  cudaStream_t stream;
};

// Launch at the end of the group, or at once outside of one.
ncclResult_t launch_at_group_end(ncclComm_t communicator, std::function<ncclResult_t()> launch);
void run_at_group_end(std::function<void()> function);
// The messages of a group make progress together: a rank may send before it receives.
ncclResult_t exchange_at_group_end(Message message);

}  // namespace stand_in
