// Element types that are known at run time only.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../element.hpp"
#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// An element type as a number, where a program learns it at run time.
enum class ElementType : std::uint8_t { float32, half, bfloat16, int8, float8_e4m3 };

/// The number of T.
template <CpuKvElement T>
inline constexpr ElementType element_type_of =
    std::is_same_v<T, float>         ? ElementType::float32
    : std::is_same_v<T, half>        ? ElementType::half
    : std::is_same_v<T, bfloat16>    ? ElementType::bfloat16
    : std::is_same_v<T, std::int8_t> ? ElementType::int8
                                     : ElementType::float8_e4m3;

/// As element_name() has it: "float", "half", "bfloat16", "int8" or "float8_e4m3".
[[nodiscard]] constexpr const char* name_of(ElementType type) noexcept {
  switch (type) {
    case ElementType::float32:
      return element_name<float>();
    case ElementType::half:
      return element_name<half>();
    case ElementType::bfloat16:
      return element_name<bfloat16>();
    case ElementType::int8:
      return element_name<std::int8_t>();
    case ElementType::float8_e4m3:
      return element_name<float8_e4m3>();
  }
  return "no element type";
}

CHUNKATTN_NAMESPACE_END
