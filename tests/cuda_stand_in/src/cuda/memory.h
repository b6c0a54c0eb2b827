// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Memory of the device, which is host memory here, and pinned memory of the host.
#pragma once
#include <cstddef>
#include <optional>

namespace stand_in {

enum class MemoryKind { kDevice, kPinned };

struct Block {
  size_t bytes;
  MemoryKind kind;
  int device;
};

// The block that an address lies in. Nothing for pageable memory, which CUDA does not know either.
std::optional<Block> find_block(const void* address);

}  // namespace stand_in
