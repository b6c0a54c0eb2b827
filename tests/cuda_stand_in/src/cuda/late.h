// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// FAKE_CUDA_LATE=SEED:PERCENT:MS[:IDLE_PERCENT]: PERCENT of the works of a stream begin up to MS
// late, and IDLE_PERCENT (50) of those that follow an idle time. SEED chooses them.
//
// A real stream is late when the GPU is busy, and so are its results. A program that forgot to wait
// then reads what was there before.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace stand_in {

struct Late {
  int seed = 0, percent = 0, ms = 0, idle_percent = 0;
  bool only_default_streams = false;

  Late() {
    const char* text = getenv("FAKE_CUDA_LATE");
    if (text) {
      idle_percent = 50;
      sscanf(text, "%d:%d:%d:%d", &seed, &percent, &ms, &idle_percent);
    }
    const char* only = getenv("FAKE_CUDA_LATE_ONLY_DEFAULT");
    only_default_streams = only && atoi(only);
  }
};

// The delays of one stream: a sequence that depends on the seed, the stream, the rank and the
// group.
class Delays {
 public:
  Delays(const Late& late, int stream, bool is_default) : late_(late) {
    active_ = late.ms > 0 && (is_default || !late.only_default_streams);
    const char* rank = getenv("LOCAL_RANK");
    const char* group = getenv("REPLICA_GROUP_ID");
    const uint64_t place = late.seed * 1000 + stream * 37 + (rank ? atoi(rank) : 0) * 5 +
                           (group ? atoi(group) : 0) + 1;
    state_ = 0x9e3779b97f4a7c15ull * place;
    for (int i = 0; i < 8; i++)
      next();
  }

  // The delay of the next work, in microseconds.
  unsigned draw(bool follows_idle_time) {
    if (!active_)
      return 0;
    const int percent = follows_idle_time ? late_.idle_percent : late_.percent;
    if (static_cast<int>(next() % 100) >= percent)
      return 0;
    return next() % (late_.ms * 1000 + 1);
  }

 private:
  unsigned next() {  // xorshift64
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<unsigned>(state_ >> 20);
  }

  const Late& late_;
  bool active_;
  uint64_t state_;
};

}  // namespace stand_in
