// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once
#include <vector>

#include "nccl/group.h"

namespace stand_in {

// Launch the messages of a group: one operation for each communicator.
ncclResult_t launch_messages(const std::vector<Message>& messages);

}  // namespace stand_in
