// fp32 to fp8, to nearest, ties to even. What lies beyond the largest number becomes that; NaN stays NaN.
#pragma once
#include "common/both.cuh"

// sign, exponent, mantissa: the format is told apart by the bits of its mantissa, 3 (e4m3) or 2 (e5m2).
template <int mantissa>
OMNIGEMM_BOTH u32 to_fp8(float value) {
    constexpr u32 LARGEST = mantissa == 3 ? 0x43e00000 : 0x47600000;  // 448, 57344
    constexpr int BIAS = mantissa == 3 ? 7 : 15, SHIFT = 23 - mantissa;
    constexpr u32 SMALLEST_NORMAL = u32(127 + 1 - BIAS) << 23;
    // Added to a smaller number, this leaves the code of it in the last bits, rounded by the addition itself.
    constexpr u32 SUBNORMAL_STEPS = u32(127 + 23 + 1 - BIAS - mantissa) << 23;
    const u32 sign = bits_of(value) >> 24 & 0x80;
    u32 size = bits_of(value) & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7f;
    if (size > LARGEST) size = LARGEST;
    if (size < SMALLEST_NORMAL) return sign | (bits_of(float_of(size) + float_of(SUBNORMAL_STEPS)) - SUBNORMAL_STEPS);
    size += (1u << (SHIFT - 1)) - 1 + (size >> SHIFT & 1);
    return sign | ((size >> SHIFT) - ((127 - BIAS) << mantissa));
}

// Four codes in a word, the first in the lowest byte.
template <int mantissa>
OMNIGEMM_BOTH u32 to_fp8x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short low, high;
    if constexpr (mantissa == 3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    }
    return low | u32(high) << 16;
#else
    return to_fp8<mantissa>(a) | to_fp8<mantissa>(b) << 8 | to_fp8<mantissa>(c) << 16 | to_fp8<mantissa>(d) << 24;
#endif
}
