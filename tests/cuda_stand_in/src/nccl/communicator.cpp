// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "nccl/communicator.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "common/environment.h"
#include "common/runtime_hooks.h"
#include "nccl/group.h"
#include "nccl/trace.h"

namespace stand_in {
namespace {

constexpr double kPollMs = 0.5;

int device_of_thread() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

void run_and_delete(void* argument) {
  const std::unique_ptr<std::function<void()>> run(static_cast<std::function<void()>*>(argument));
  (*run)();
}

}  // namespace

void nap(double ms) {
  std::this_thread::sleep_for(std::chrono::microseconds(static_cast<long>(ms * 1000)));
}

}  // namespace stand_in

using namespace stand_in;

ncclComm::ncclComm(std::string name, int ranks, int rank, bool blocking)
    : name(std::move(name)),
      ranks(ranks),
      rank(rank),
      device(device_of_thread()),
      blocking_(blocking),
      notices_lost_ranks_(knob("FAKE_NCCL_NET", 0)) {}

ncclResult_t ncclComm::connect() {
  if (blocking_) {
    const ncclResult_t connected = connect_ranks();
    result = connected;
    return connected;
  }
  result = ncclInProgress;
  connecting_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "fakenccl_init");
    result = connect_ranks();
  });
  return ncclInProgress;
}

// The set-up ends when all ranks have come, or by an abort. NCCL itself waits for a rank that does
// not come, and an abort ends its wait (abortFlag in bootstrap.cc).
ncclResult_t ncclComm::connect_ranks() {
  if (!wait_unless_aborted("FAKE_NCCL_CONNECT_MS", 5))
    return ncclInternalError;
  if (!transport.open(name, ranks))
    return ncclSystemError;
  transport.state()->pid[rank] = getpid();
  while (transport.count_connected() < ranks) {
    if (aborted_)
      return ncclInternalError;
    if (notices_lost_ranks_ && transport.has_lost_rank())
      return ncclRemoteError;
    nap(kPollMs);
  }
  if (rank == 0)
    transport.unlink();
  NCCL_TRACE("comm %s rank %d of %d connected", name.c_str(), rank, ranks);
  return ncclSuccess;
}

// Wait for the time that a knob gives, or, if it is "never", until the abort. False if aborted.
bool ncclComm::wait_unless_aborted(const char* name, int otherwise_ms) {
  const bool never_ends = knob_is(name, "never");
  const auto time = std::chrono::milliseconds(knob(name, otherwise_ms));
  const auto end = std::chrono::steady_clock::now() + time;
  while (!aborted_ && (never_ends || std::chrono::steady_clock::now() < end))
    nap(kPollMs);
  return !aborted_;
}

ncclResult_t ncclComm::launch(cudaStream_t stream, std::function<void()> run) {
  if (result == ncclInProgress) {
    fprintf(stderr,
            "[fakenccl] Attempt to use communicator before the previous operation returned "
            "ncclSuccess\n");
    return ncclInvalidArgument;
  }
  if (result != ncclSuccess)
    return static_cast<ncclResult_t>(result.load());
  operations_++;
  auto* operation = new std::function<void()>([this, run = std::move(run)] {
    run();
    operations_--;
  });
  if (blocking_) {
    fakecuda_enqueue(stream, run_and_delete, operation);
    return ncclSuccess;
  }
  result = ncclInProgress;
  if (launching_.joinable())
    launching_.join();
  launching_ = std::thread([this, stream, operation] {
    cudaSetDevice(device);
    // NCCL connects an algorithm at its first use (ncclCollPreconnect in group.cc), so a launch can
    // take long, or never end. An abort in that time leaves torch's poll without an answer
    // (NCCLComm::getAsyncError on a null communicator).
    wait_unless_aborted("FAKE_NCCL_LAUNCH_MS", 0);
    fakecuda_enqueue(stream, run_and_delete, operation);
    result = aborted_ ? ncclInternalError : ncclSuccess;
  });
  return ncclInProgress;
}

void ncclComm::abort() {
  NCCL_TRACE("comm %s rank %d abort", name.c_str(), rank);
  aborted_ = true;
  join_threads();
}

void ncclComm::join_threads() {
  if (connecting_.joinable())
    connecting_.join();
  if (launching_.joinable())
    launching_.join();
}

void ncclComm::wait_for_operations() {
  while (operations_)
    nap(kPollMs);
}

// The handle's own memory stays, so that a use after the end is reported.
void ncclComm::reclaim() {
  NCCL_TRACE("comm %s rank %d reclaim begins, %d pending", name.c_str(), rank, operations_.load());
  join_threads();
  wait_for_operations();
  nap(knob("FAKE_NCCL_ABORT_MS", 0));
  // NCCL gives device memory back, and cudaFree waits for the device: an abort waits for the
  // kernels of other communicators.
  if (knob("FAKE_NCCL_FREE_SYNCS", 1))
    fakecuda_sync_device();
  transport.close();
  reclaimed_ = true;
  NCCL_TRACE("comm %s rank %d reclaimed", name.c_str(), rank);
}

bool ncclComm::is_usable(ncclComm* communicator, const char* caller) {
  if (!communicator)
    return false;
  if (!communicator->reclaimed_)
    return true;
  fprintf(stderr, "[fakenccl %d] USE AFTER FREE of comm %s in %s\n", getpid(),
          communicator->name.c_str(), caller);
  return false;
}

// Only NCCL's network transports notice that a peer is gone. Over shared memory and NVLink a kernel
// waits until somebody aborts.
void ncclComm::look_for_lost_rank() {
  if (notices_lost_ranks_ && result != ncclRemoteError && transport.has_lost_rank())
    result = ncclRemoteError;
}

NCCL_API ncclResult_t ncclGetVersion(int* version) {
  *version = kNcclVersion;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "fakenccl-%08x%08x%08x%08x", random(), random(),
           random(), random());
  return ncclSuccess;
}

NCCL_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "fake error";
  }
}

NCCL_API const char* ncclGetLastError(ncclComm_t) {
  return "fake";
}

NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int ranks, ncclUniqueId id,
                                             int rank, ncclConfig_t* config) {
  const bool blocking = !config || config->blocking != 0;
  *communicator = new ncclComm(id.internal, ranks, rank, blocking);
  return (*communicator)->connect();
}

NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId id,
                                       int rank) {
  return ncclCommInitRankConfig(communicator, ranks, id, rank, nullptr);
}

NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int ranks, int rank, int,
                                               ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(communicator, ranks, ids[0], rank, config);
}

NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* result) {
  if (!ncclComm::is_usable(communicator, "GetAsyncError"))
    return ncclInvalidArgument;
  *result = static_cast<ncclResult_t>(communicator->result.load());
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  if (!communicator)
    return ncclSuccess;
  if (!ncclComm::is_usable(communicator, "Abort"))
    return ncclInvalidArgument;
  communicator->abort();
  // torch aborts several communicators in one group (abortCommsFromMap): none waits for another.
  run_at_group_end([=] { communicator->reclaim(); });
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  if (!communicator)
    return ncclSuccess;
  communicator->wait_for_operations();
  communicator->reclaim();
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  communicator->wait_for_operations();
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommCount(ncclComm_t communicator, int* ranks) {
  *ranks = communicator->ranks;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return ncclSuccess;
}

// torch 2.15's second backend ("nccl2") registers each block of its allocator. The stand-in's
// collectives read any address, so a registration has nothing to prepare.
NCCL_API ncclResult_t ncclCommRegister(ncclComm_t communicator, void* block, size_t, void** handle) {
  if (!ncclComm::is_usable(communicator, "Register"))
    return ncclInvalidArgument;
  *handle = block;
  return ncclSuccess;
}

NCCL_API ncclResult_t ncclCommDeregister(ncclComm_t, void*) {
  return ncclSuccess;
}
