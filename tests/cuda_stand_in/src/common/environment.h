// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// The knobs of the stand-in: variables of the environment, listed in README.md.
//
// A knob is read at each use unless a comment says otherwise, so that a test can change it while
// the process runs.
#pragma once
#include <cstdlib>
#include <cstring>

namespace stand_in {

inline int knob(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

inline bool knob_is(const char* name, const char* value) {
  const char* text = getenv(name);
  return text && strcmp(text, value) == 0;
}

}  // namespace stand_in
