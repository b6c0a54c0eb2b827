// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Work of the device that an operator's CPU kernel does, and work that nothing does.
#pragma once

namespace stand_in {

// True while the calling thread is inside an operator that stand_in_ops computes.
bool operator_computes();
// The name of that operator, or an empty string.
const char* operator_at_work();

enum class Severity { kNote, kError };

// Report, once for each name and operator, work whose result nothing computes. Under
// FAKE_CUDA_STRICT=1 an error ends the process with status 87.
void report_unmodelled(const char* what, const char* name, Severity severity);

}  // namespace stand_in
