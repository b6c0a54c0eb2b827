// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Collectives: rounds in which each rank writes a part of its input into its slot, waits for all
// others, and reads their slots. One round covers all but the largest inputs.
#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/data_type.h"
#include "nccl/group.h"
#include "nccl/trace.h"

namespace stand_in {
namespace {

constexpr double kPollMs = 0.05;
// Parts begin at multiples of the largest element.
constexpr size_t kAlignment = 8;

// The part of each block that a round covers.
struct Part {
  size_t offset;
  size_t bytes;
};

struct Collective {
  const char* name;
  // Null in a rank whose input nobody reads.
  const char* input;
  // The input consists of this many blocks: one for each rank in a scatter, else one.
  int blocks;
  size_t block_bytes;
  // Reads a round: `slots` has each rank's parts, block after block.
  std::function<void(Part part, const std::vector<const char*>& slots)> read;

  size_t part_bytes() const {
    const size_t most = Transport::kSlotBytes / blocks / kAlignment * kAlignment;
    return std::min(block_bytes, most);
  }
  uint64_t rounds() const {
    return block_bytes ? (block_bytes + part_bytes() - 1) / part_bytes() : 1;
  }
};

class Execution {
 public:
  Execution(ncclComm_t communicator, Collective collective, uint64_t rounds_before)
      : communicator_(communicator),
        collective_(std::move(collective)),
        rounds_before_(rounds_before) {}

  void run() const {
    for (uint64_t round = 0; round < collective_.rounds(); round++) {
      if (!run_round(round)) {
        NCCL_TRACE("op %s %lu broken off", collective_.name, rounds_before_ + round + 1);
        return;
      }
    }
  }

 private:
  // False after an abort.
  bool run_round(uint64_t round) const {
    TransportState* state = communicator_->transport.state();
    const uint64_t number = rounds_before_ + round + 1;
    const size_t offset = round * collective_.part_bytes();
    const Part part{offset, std::min(collective_.part_bytes(), collective_.block_bytes - offset)};
    if (!wait_for_ranks(state->consumed, number - 1))
      return false;
    write(part);
    state->published[communicator_->rank] = number;
    if (!wait_for_ranks(state->published, number))
      return false;
    std::vector<const char*> slots;
    for (int rank = 0; rank < communicator_->ranks; rank++)
      slots.push_back(communicator_->transport.slot(rank));
    collective_.read(part, slots);
    state->consumed[communicator_->rank] = number;
    return true;
  }

  void write(Part part) const {
    if (!collective_.input)
      return;
    char* slot = communicator_->transport.slot(communicator_->rank);
    for (int block = 0; block < collective_.blocks; block++) {
      const char* source = collective_.input + block * collective_.block_bytes + part.offset;
      memcpy(slot + block * part.bytes, source, part.bytes);
    }
  }

  bool wait_for_ranks(const std::atomic<uint64_t>* progress, uint64_t number) const {
    const auto arrived = [&](const std::atomic<uint64_t>& rank) { return rank >= number; };
    while (!std::all_of(progress, progress + communicator_->ranks, arrived)) {
      if (communicator_->was_aborted())
        return false;
      communicator_->look_for_lost_rank();
      nap(kPollMs);
    }
    return true;
  }

  const ncclComm_t communicator_;
  const Collective collective_;
  const uint64_t rounds_before_;
};

ncclResult_t launch(ncclComm_t communicator, cudaStream_t stream, Collective collective) {
  if (!ncclComm::is_usable(communicator, collective.name))
    return ncclInvalidArgument;
  return launch_at_group_end(communicator, [=] {
    const Execution execution(communicator, collective, communicator->rounds);
    NCCL_TRACE("%s #%lu of %zu bytes on comm %s rank %d", collective.name, communicator->rounds + 1,
               collective.block_bytes * collective.blocks, communicator->name.c_str(),
               communicator->rank);
    const ncclResult_t result = communicator->launch(stream, [=] { execution.run(); });
    if (result == ncclSuccess || result == ncclInProgress)
      communicator->rounds += collective.rounds();
    return result;
  });
}

const char* bytes_of(const void* memory) {
  return static_cast<const char*>(memory);
}
char* bytes_of(void* memory) {
  return static_cast<char*>(memory);
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

NCCL_API ncclResult_t ncclAllReduce(const void* input, void* output, size_t count,
                                    ncclDataType_t type, ncclRedOp_t operation,
                                    ncclComm_t communicator, cudaStream_t stream) {
  const auto read = [=](Part part, const std::vector<const char*>& slots) {
    reduce(bytes_of(output) + part.offset, slots, part.bytes / size_of(type), type, operation);
  };
  return launch(communicator, stream,
                {"AllReduce", bytes_of(input), 1, count * size_of(type), read});
}

NCCL_API ncclResult_t ncclReduce(const void* input, void* output, size_t count, ncclDataType_t type,
                                 ncclRedOp_t operation, int root, ncclComm_t communicator,
                                 cudaStream_t stream) {
  const auto read = [=](Part part, const std::vector<const char*>& slots) {
    if (communicator->rank == root)
      reduce(bytes_of(output) + part.offset, slots, part.bytes / size_of(type), type, operation);
  };
  return launch(communicator, stream, {"Reduce", bytes_of(input), 1, count * size_of(type), read});
}

NCCL_API ncclResult_t ncclAllGather(const void* input, void* output, size_t count,
                                    ncclDataType_t type, ncclComm_t communicator,
                                    cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  const auto read = [=](Part part, const std::vector<const char*>& slots) {
    for (size_t rank = 0; rank < slots.size(); rank++)
      memcpy(bytes_of(output) + rank * bytes + part.offset, slots[rank], part.bytes);
  };
  return launch(communicator, stream, {"AllGather", bytes_of(input), 1, bytes, read});
}

NCCL_API ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count,
                                        ncclDataType_t type, ncclRedOp_t operation,
                                        ncclComm_t communicator, cudaStream_t stream) {
  const auto read = [=](Part part, std::vector<const char*> slots) {
    for (const char*& slot : slots)
      slot += communicator->rank * part.bytes;
    reduce(bytes_of(output) + part.offset, slots, part.bytes / size_of(type), type, operation);
  };
  return launch(
      communicator, stream,
      {"ReduceScatter", bytes_of(input), communicator->ranks, count * size_of(type), read});
}

NCCL_API ncclResult_t ncclAlltoAll(const void* input, void* output, size_t count,
                                   ncclDataType_t type, ncclComm_t communicator,
                                   cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  const auto read = [=](Part part, const std::vector<const char*>& slots) {
    for (size_t rank = 0; rank < slots.size(); rank++) {
      const char* source = slots[rank] + communicator->rank * part.bytes;
      memcpy(bytes_of(output) + rank * bytes + part.offset, source, part.bytes);
    }
  };
  return launch(communicator, stream,
                {"AlltoAll", bytes_of(input), communicator->ranks, bytes, read});
}

NCCL_API ncclResult_t ncclBroadcast(const void* input, void* output, size_t count,
                                    ncclDataType_t type, int root, ncclComm_t communicator,
                                    cudaStream_t stream) {
  const auto read = [=](Part part, const std::vector<const char*>& slots) {
    memcpy(bytes_of(output) + part.offset, slots[root], part.bytes);
  };
  const char* source = communicator->rank == root ? bytes_of(input) : nullptr;
  return launch(communicator, stream, {"Broadcast", source, 1, count * size_of(type), read});
}

NCCL_API ncclResult_t ncclBcast(void* memory, size_t count, ncclDataType_t type, int root,
                                ncclComm_t communicator, cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, type, root, communicator, stream);
}
