// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
// Random numbers: drawn by the CPU's kernels, in place of Philox kernels.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace stand_in {

// The state of a CUDA generator. An operator's numbers are a function of it, and the original
// operator's host code advances the offset, as on a GPU: torch's DTensor and activation
// checkpointing save, set and restore both.
struct PhiloxState {
  uint64_t seed = 0;
  uint64_t offset = 0;

  // A generator of the CPU's that begins at this state.
  at::Generator cpu_generator() const;
};

// The state of the generator that an operator was given, or of the device's default one.
PhiloxState philox_state(const c10::IValue* given, int device);

// Whether random operators draw from the CPU's default generator, in the order of their calls
// (STAND_IN_RNG=cpu, read once): the initial weights are those of a CPU run then.
bool draws_as_cpu();

// The generator for an operator's CPU kernel.
at::Generator generator_for(const c10::IValue* given, int device);

}  // namespace stand_in
