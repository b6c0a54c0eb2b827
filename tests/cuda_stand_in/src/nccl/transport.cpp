// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "nccl/transport.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace stand_in {
namespace {

// Whether a process has ended. One that its parent has not waited for yet has ended, too, although
// a signal can still be sent to it.
bool has_ended(int pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "r");
  if (!file)
    return true;
  char text[512] = "";
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  // "pid (name) state ...", and the name may contain parentheses.
  const char* name_end = strrchr(text, ')');
  if (!name_end || strlen(name_end) < 3)
    return true;
  const char process_state = name_end[2];
  return process_state == 'Z' || process_state == 'X';
}

}  // namespace

bool Transport::open(const std::string& name, int ranks) {
  if (ranks > kMaxRanks) {
    fprintf(stderr, "[fakenccl] a communicator has at most %d ranks, not %d\n", kMaxRanks, ranks);
    return false;
  }
  path_ = "/dev/shm/" + name;
  ranks_ = ranks;
  bytes_ = kStateBytes + kSlotBytes * ranks + kChannelBytes * ranks * ranks;
  const int file = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0)
    return false;
  void* memory = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes_)) == 0)
    memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory == MAP_FAILED)
    return false;
  memory_ = static_cast<char*>(memory);
  return true;
}

void Transport::unlink() {
  ::unlink(path_.c_str());
}

void Transport::close() {
  if (memory_)
    munmap(memory_, bytes_);
  memory_ = nullptr;
}

int Transport::count_connected() {
  int connected = 0;
  for (int rank = 0; rank < ranks_; rank++)
    connected += state()->pid[rank] != 0;
  return connected;
}

bool Transport::has_lost_rank() {
  for (int rank = 0; rank < ranks_; rank++) {
    const int pid = state()->pid[rank];
    if (pid && has_ended(pid))
      return true;
  }
  return false;
}

}  // namespace stand_in
