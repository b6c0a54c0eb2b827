// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Element types and reductions.
#pragma once
#include <cstddef>
#include <vector>

#include "nccl/api.h"

namespace stand_in {

size_t size_of(ncclDataType_t type);

// Reduce `count` elements of all inputs, in the order of the ranks. bfloat16 and float16 are added
// as float and rounded once. NCCL's rings and trees add in another order, and round at each hop.
void reduce(void* output, const std::vector<const char*>& inputs, size_t count, ncclDataType_t type,
            ncclRedOp_t operation);

}  // namespace stand_in
