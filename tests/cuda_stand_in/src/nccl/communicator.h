// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Communicators: set-up, launches, aborts.
#pragma once
#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "nccl/api.h"
#include "nccl/transport.h"

// torch's communicators are non-blocking in this project: a call returns ncclInProgress, a thread
// does the work, and torch polls ncclCommGetAsyncError (C10D_NCCL_CHECK_TIMEOUT). A collective that
// torch does not poll for fails (torch::cuda::nccl::all2all_single_equal_split).
struct ncclComm {
  ncclComm(std::string name, int ranks, int rank, bool blocking);

  // Connect the ranks: at once in a blocking communicator, else by a thread.
  ncclResult_t connect();

  // Put an operation into a stream, in the order of the calls: at once in a blocking communicator,
  // else by a thread. `run` runs in the stream and ends early after an abort.
  ncclResult_t launch(cudaStream_t stream, std::function<void()> run);

  // End whatever waits: the set-up, launches, and operations in streams.
  void abort();
  // Wait for launches and operations, and give the memory back.
  void reclaim();
  void wait_for_operations();

  // True if the communicator can be used; reports a use after it was given back.
  static bool is_usable(ncclComm* communicator, const char* caller);

  bool was_aborted() const { return aborted_; }
  // Under FAKE_NCCL_NET=1, notice a lost rank: the communicator's error becomes ncclRemoteError.
  void look_for_lost_rank();

  const std::string name;
  const int ranks;
  const int rank;
  const int device;
  // ncclInProgress, the first error, or ncclSuccess.
  std::atomic<int> result{ncclSuccess};
  stand_in::Transport transport;
  // The rounds of all collectives that were launched so far.
  uint64_t rounds = 0;

 private:
  ncclResult_t connect_ranks();
  void await_launch();
  bool wait_unless_aborted(const char* knob, int otherwise_ms);
  void join_threads();

  const bool blocking_;
  const bool notices_lost_ranks_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> reclaimed_{false};
  std::atomic<int> operations_{0};
  std::thread connecting_;
  std::thread launching_;
};

namespace stand_in {

void nap(double ms);

}  // namespace stand_in
