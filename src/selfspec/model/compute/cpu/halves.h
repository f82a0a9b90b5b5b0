// Floating-point numbers of 16 bits.

#pragma once

#include <cstdint>
#include <cstring>

static inline float from_half(uint16_t half) {
    uint32_t size = half & 0x7fff, moved = (size << 13) + (112u << 23);  // another exponent
    float value;
    std::memcpy(&value, &moved, sizeof value);
    if (size < 0x400) value = size * 0x1p-24f;
    return half & 0x8000 ? -value : value;
}
