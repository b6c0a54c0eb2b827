// Copyright (c) the titan_ft authors. All rights reserved.
// SPDX-License-Identifier: BSD-3-Clause
#include "nccl/data_type.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

namespace stand_in {
namespace {

constexpr int kUnsupportedExit = 86;
constexpr int kFirstScaledSum = 100;

struct Bfloat16 {
  uint16_t bits;

  float load() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static Bfloat16 round(float value) {  // to the nearest, ties to even
    if (std::isnan(value))
      return {0x7fc0};
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    wide += 0x7fff + ((wide >> 16) & 1);
    return {static_cast<uint16_t>(wide >> 16)};
  }
};

struct Float16 {
  uint16_t bits;

  float load() const {
    const int exponent = (bits >> 10) & 0x1f;
    const int fraction = bits & 0x3ff;
    float value = exponent ? std::ldexp(1024.0f + fraction, exponent - 25)
                           : std::ldexp(static_cast<float>(fraction), -24);
    if (exponent == 0x1f)
      value = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -value : value;
  }
  static Float16 round(float value) {  // to the nearest, ties to even
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float magnitude = std::fabs(value);
    if (std::isnan(value))
      return {0x7e00};
    if (magnitude >= 65520.0f)
      return {static_cast<uint16_t>(sign | 0x7c00)};
    int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
    // In units of the last place; nearbyint rounds ties to even. A carry moves on into the
    // exponent.
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    const int biased = units >= 1024 ? exponent + 15 : 0;
    const int encoded = biased ? ((biased - 1) << 10) + units : units;
    return {static_cast<uint16_t>(sign | encoded)};
  }
};

// The type in which elements are added.
template <class Element>
struct Arithmetic {
  using Value = Element;
  static Value load(Element element) { return element; }
  static Element store(Value value) { return value; }
};

template <class Element>
struct RoundedArithmetic {
  using Value = float;
  static Value load(Element element) { return element.load(); }
  static Element store(Value value) { return Element::round(value); }
};

template <>
struct Arithmetic<Bfloat16> : RoundedArithmetic<Bfloat16> {};
template <>
struct Arithmetic<Float16> : RoundedArithmetic<Float16> {};

std::mutex g_scales_mutex;

std::map<int, double>& scales() {
  static auto* scales = new std::map<int, double>;
  return *scales;
}

double scale_of(ncclRedOp_t operation) {
  if (operation < kFirstScaledSum)
    return 1;
  std::lock_guard lock(g_scales_mutex);
  return scales()[operation];
}

template <class Value>
Value combine(Value left, Value right, ncclRedOp_t operation) {
  switch (operation) {
    case ncclMax:
      return left > right ? left : right;
    case ncclMin:
      return left < right ? left : right;
    case ncclProd:
      return left * right;
    default:
      return left + right;
  }
}

template <class Element>
void reduce_as(void* output, const std::vector<const char*>& inputs, size_t count,
               ncclRedOp_t operation) {
  using Number = Arithmetic<Element>;
  using Value = typename Number::Value;
  const bool scaled = operation >= kFirstScaledSum;
  const double scale = scale_of(operation);
  const auto load = [&](const char* input, size_t i) {
    const Value value = Number::load(reinterpret_cast<const Element*>(input)[i]);
    return scaled ? static_cast<Value>(value * scale) : value;
  };
  auto* reduced = static_cast<Element*>(output);
  for (size_t i = 0; i < count; i++) {
    Value value = load(inputs[0], i);
    for (size_t rank = 1; rank < inputs.size(); rank++)
      value = combine(value, load(inputs[rank], i), operation);
    if (operation == ncclAvg)
      value = value / static_cast<Value>(inputs.size());
    reduced[i] = Number::store(value);
  }
}

double scalar_of(const void* scalar, ncclDataType_t type) {
  switch (type) {
    case ncclFloat32:
      return *static_cast<const float*>(scalar);
    case ncclFloat64:
      return *static_cast<const double*>(scalar);
    case ncclBfloat16:
      return static_cast<const Bfloat16*>(scalar)->load();
    case ncclFloat16:
      return static_cast<const Float16*>(scalar)->load();
    default:
      return 1;
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

void reduce(void* output, const std::vector<const char*>& inputs, size_t count, ncclDataType_t type,
            ncclRedOp_t operation) {
  switch (type) {
    case ncclInt8:
      return reduce_as<int8_t>(output, inputs, count, operation);
    case ncclUint8:
      return reduce_as<uint8_t>(output, inputs, count, operation);
    case ncclInt32:
      return reduce_as<int32_t>(output, inputs, count, operation);
    case ncclUint32:
      return reduce_as<uint32_t>(output, inputs, count, operation);
    case ncclInt64:
      return reduce_as<int64_t>(output, inputs, count, operation);
    case ncclUint64:
      return reduce_as<uint64_t>(output, inputs, count, operation);
    case ncclFloat16:
      return reduce_as<Float16>(output, inputs, count, operation);
    case ncclBfloat16:
      return reduce_as<Bfloat16>(output, inputs, count, operation);
    case ncclFloat32:
      return reduce_as<float>(output, inputs, count, operation);
    case ncclFloat64:
      return reduce_as<double>(output, inputs, count, operation);
    default:
      fprintf(stderr, "[fakenccl %d] reductions of type %d are not modelled\n", getpid(), type);
      fflush(stderr);
      _exit(kUnsupportedExit);
  }
}

}  // namespace stand_in

using namespace stand_in;

// A sum of scaled inputs: FSDP divides gradients so (ReduceOp PREMUL_SUM).
NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* scalar,
                                               ncclDataType_t type, ncclScalarResidence_t,
                                               ncclComm_t) {
  std::lock_guard lock(g_scales_mutex);
  const int number = kFirstScaledSum + static_cast<int>(scales().size());
  scales()[number] = scalar_of(scalar, type);
  *operation = number;
  return ncclSuccess;
}

// The scale stays: an operation in a stream may still need it.
NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
  return ncclSuccess;
}
