// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "nccl/group.h"

#include <utility>
#include <vector>

#include "nccl/communicator.h"
#include "nccl/point_to_point.h"

namespace stand_in {
namespace {

struct Launch {
  ncclComm_t communicator;
  std::function<ncclResult_t()> run;
};

struct Group {
  int depth = 0;
  std::vector<Launch> launches;
  std::vector<Message> messages;
  std::vector<std::function<void()>> functions;
};

thread_local Group t_group;

// Launch in the order of the calls, each when the communicator has launched the one before.
ncclResult_t run_launches(const std::vector<Launch>& launches) {
  ncclResult_t worst = ncclSuccess;
  for (const Launch& launch : launches) {
    while (launch.communicator->result == ncclInProgress && !launch.communicator->was_aborted())
      nap(0.05);
    const ncclResult_t result = launch.run();
    if (result != ncclSuccess)
      worst = result;
  }
  return worst;
}

}  // namespace

ncclResult_t launch_at_group_end(ncclComm_t communicator, std::function<ncclResult_t()> launch) {
  if (t_group.depth == 0)
    return launch();
  t_group.launches.push_back({communicator, std::move(launch)});
  return ncclSuccess;
}

void run_at_group_end(std::function<void()> function) {
  if (t_group.depth == 0)
    function();
  else
    t_group.functions.push_back(std::move(function));
}

ncclResult_t exchange_at_group_end(Message message) {
  ncclGroupStart();
  t_group.messages.push_back(message);
  return ncclGroupEnd();
}

}  // namespace stand_in

using namespace stand_in;

NCCL_API ncclResult_t ncclGroupStart() {
  t_group.depth++;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclGroupEnd() {
  if (--t_group.depth > 0)
    return ncclSuccess;
  const Group group = std::exchange(t_group, Group());
  ncclResult_t result = run_launches(group.launches);
  const ncclResult_t exchanged = launch_messages(group.messages);
  if (exchanged != ncclSuccess)
    result = exchanged;
  for (const auto& function : group.functions)
    function();
  return result;
}
