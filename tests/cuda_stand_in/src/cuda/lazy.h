// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// FAKE_CUDA_LAZY=MS[:SEED:PERCENT]: a stream begins a work only when somebody waits for it, and
// otherwise after MS. PERCENT of the works begin at once all the same; SEED chooses them.
//
// The host waits for a stream, or a stream that somebody waits for reaches a wait for another
// stream. A wait that the program forgot then reads too early in each run. Under FAKE_CUDA_LATE it
// does so in some runs only.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace stand_in {

struct Lazy {
  int ms = 0, seed = 0, percent = 0;
  Lazy() {
    const char* text = getenv("FAKE_CUDA_LAZY");
    if (text)
      sscanf(text, "%d:%d:%d", &ms, &seed, &percent);
  }
  // Whether a stream begins its next work although nobody waits for it.
  bool begins(int stream, uint64_t work) const {
    uint64_t x = (seed * 1000003ull + stream) * 1000003ull + work + 1;
    x *= 0x9e3779b97f4a7c15ull;
    return int((x >> 33) % 100) < percent;
  }
};

}  // namespace stand_in
