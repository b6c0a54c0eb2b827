// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// The memory that the ranks of a communicator share: a file in /dev/shm, which the last to connect
// unlinks. It models a transport that loses nothing and notices nothing by itself.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace stand_in {

constexpr int kMaxRanks = 32;

// All begins as zeros, because the file does.
struct TransportState {
  std::atomic<int> pid[kMaxRanks];
  // Rounds of collectives that a rank has written into its slot, and has read from all slots.
  std::atomic<uint64_t> published[kMaxRanks];
  std::atomic<uint64_t> consumed[kMaxRanks];
  // Messages that were written into, and read from, the channel of an ordered pair of ranks.
  std::atomic<uint64_t> sent[kMaxRanks][kMaxRanks];
  std::atomic<uint64_t> received[kMaxRanks][kMaxRanks];
};

class Transport {
 public:
  static constexpr size_t kSlotBytes = 64ull << 20;
  static constexpr size_t kChannelBytes = 4ull << 20;

  bool open(const std::string& name, int ranks);
  void unlink();
  void close();

  TransportState* state() { return reinterpret_cast<TransportState*>(memory_); }
  // A rank's input of the current round.
  char* slot(int rank) { return memory_ + kStateBytes + kSlotBytes * rank; }
  char* channel(int from, int to) {
    return slot(ranks_) + kChannelBytes * (static_cast<size_t>(from) * ranks_ + to);
  }

  int count_connected();
  // Whether the process of a connected rank is gone.
  bool has_lost_rank();

 private:
  static constexpr size_t kStateBytes = 64 << 10;
  static_assert(sizeof(TransportState) <= kStateBytes);

  std::string path_;
  int ranks_ = 0;
  size_t bytes_ = 0;
  char* memory_ = nullptr;
};

}  // namespace stand_in
