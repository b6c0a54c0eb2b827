// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "nccl/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "nccl/communicator.h"
#include "nccl/data_type.h"
#include "nccl/trace.h"

namespace stand_in {
namespace {

constexpr double kPollMs = 0.05;

struct Transfer {
  Message message;
  size_t done = 0;

  bool is_over() const { return done >= message.bytes; }
};

// Write or read one part of a message if its channel is free or full.
void advance(ncclComm_t communicator, Transfer& transfer) {
  const Message& message = transfer.message;
  const bool sends = message.side == Message::Side::kSend;
  const int from = sends ? communicator->rank : message.peer;
  const int to = sends ? message.peer : communicator->rank;
  TransportState* state = communicator->transport.state();
  std::atomic<uint64_t>& sent = state->sent[from][to];
  std::atomic<uint64_t>& received = state->received[from][to];
  char* channel = communicator->transport.channel(from, to);
  char* memory = message.memory + transfer.done;
  const size_t bytes = std::min(Transport::kChannelBytes, message.bytes - transfer.done);
  if (sends && sent == received) {
    memcpy(channel, memory, bytes);
    transfer.done += bytes;
    sent++;
  } else if (!sends && sent > received) {
    memcpy(memory, channel, bytes);
    transfer.done += bytes;
    received++;
  }
}

// Advance the first unfinished message of each channel: those of one channel keep their order.
// Return whether all are over.
bool advance_all(ncclComm_t communicator, std::vector<Transfer>& transfers) {
  bool all_over = true;
  std::vector<bool> sends_to(communicator->ranks);
  std::vector<bool> receives_from(communicator->ranks);
  for (Transfer& transfer : transfers) {
    if (transfer.is_over())
      continue;
    const bool sends = transfer.message.side == Message::Side::kSend;
    std::vector<bool>& busy = sends ? sends_to : receives_from;
    if (!busy[transfer.message.peer]) {
      busy[transfer.message.peer] = true;
      advance(communicator, transfer);
    }
    all_over = all_over && transfer.is_over();
  }
  return all_over;
}

ncclResult_t launch_transfers(ncclComm_t communicator, std::vector<Transfer> transfers) {
  if (!ncclComm::is_usable(communicator, "SendRecv"))
    return ncclInvalidArgument;
  size_t bytes = 0;
  for (const Transfer& transfer : transfers)
    bytes += transfer.message.bytes;
  NCCL_TRACE("SendRecv of %zu bytes on comm %s rank %d", bytes, communicator->name.c_str(),
             communicator->rank);
  const cudaStream_t stream = transfers.front().message.stream;
  return communicator->launch(stream, [communicator, transfers]() mutable {
    while (!advance_all(communicator, transfers) && !communicator->was_aborted()) {
      communicator->look_for_lost_rank();
      nap(kPollMs);
    }
  });
}

}  // namespace

ncclResult_t launch_messages(const std::vector<Message>& messages) {
  std::map<ncclComm_t, std::vector<Transfer>> transfers;
  for (const Message& message : messages)
    transfers[message.communicator].push_back({message});
  ncclResult_t worst = ncclSuccess;
  for (const auto& [communicator, of_communicator] : transfers) {
    const ncclResult_t result = launch_transfers(communicator, of_communicator);
    if (result != ncclSuccess)
      worst = result;
  }
  return worst;
}

}  // namespace stand_in

using namespace stand_in;

NCCL_API ncclResult_t ncclSend(const void* memory, size_t count, ncclDataType_t type, int peer,
                               ncclComm_t communicator, cudaStream_t stream) {
  char* source = static_cast<char*>(const_cast<void*>(memory));
  const size_t bytes = count * size_of(type);
  return exchange_at_group_end({communicator, Message::Side::kSend, peer, source, bytes, stream});
}

NCCL_API ncclResult_t ncclRecv(void* memory, size_t count, ncclDataType_t type, int peer,
                               ncclComm_t communicator, cudaStream_t stream) {
  char* target = static_cast<char*>(memory);
  const size_t bytes = count * size_of(type);
  return exchange_at_group_end(
      {communicator, Message::Side::kReceive, peer, target, bytes, stream});
}
