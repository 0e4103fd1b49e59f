// The formulas of docs/quantizers.md: what values span, the scale that follows, and the codes.
#pragma once
#include "quant/fp8.cuh"

enum Codec : int { INT8, INT8_ZERO, E4M3, E5M2 };

constexpr u32 INFINITE = 0x7f800000;
constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: added to a number below 2^22, it rounds it to an integer

// What the values that share a scale span, 0 included, by the bits of fp32 as integers. Their order is that of the
// numbers, with infinity and then NaN above them, and the largest is the same in whatever order it is found.
struct Span {
    u32 magnitude = 0;  // without signs
    // For INT8_ZERO instead: as signed integers those without a sign are largest, as unsigned ones those with one, and
    // the larger their magnitude, the larger. A `low` without a sign says that no value had one.
    int high = 0;
    u32 low = 0;

    template <Codec codec>
    OMNIGEMM_BOTH void include(u32 magnitude_bits, u32 high_bits, u32 low_bits) {
        if constexpr (codec == INT8_ZERO) {
            high = int(high_bits) > high ? int(high_bits) : high;
            low = low_bits > low ? low_bits : low;
        } else {
            magnitude = magnitude_bits > magnitude ? magnitude_bits : magnitude;
        }
    }
    template <Codec codec>
    OMNIGEMM_BOTH void include(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        if constexpr (codec != INT8_ZERO) {
            // One instruction; of a NaN it makes another, which is as large as any.
            float most;
            asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(float_of(magnitude)), "f"(fabsf(value)));
            magnitude = bits_of(most);
            return;
        }
#endif
        include<codec>(bits_of(value) & 0x7fffffff, bits_of(value), bits_of(value));
    }
    template <Codec codec>
    OMNIGEMM_BOTH void include(const Span& other) {
        include<codec>(other.magnitude, u32(other.high), other.low);
    }
};

struct Scale {
    float value;
    int zero;   // the code of 0, for INT8_ZERO
    bool none;  // an infinity or a NaN is among the values: the scale is NaN and all codes are 0
};

// value / by, correctly rounded, without a division's branches: all values were tried with each `by` that there is
// here.
template <int by>
OMNIGEMM_BOTH float divided(float value) {
    constexpr float RECIPROCAL = 1.0f / by;
    const float near = value * RECIPROCAL;
    return fma_of(RECIPROCAL, fma_of(-float(by), near, value), near);
}

template <Codec codec>
OMNIGEMM_BOTH Scale scale_of(const Span& span) {
    constexpr float SMALLEST = 1.17549435e-38f;  // 2^-126
    const u32 low = span.low >> 31 ? span.low : 0x80000000, below = low & 0x7fffffff, above = u32(span.high);
    const u32 magnitude = codec != INT8_ZERO ? span.magnitude : above > below ? above : below;
    const bool none = magnitude >= INFINITE, empty = magnitude == 0;
    float scale;
    if constexpr (codec == INT8_ZERO)
        scale = divided<255>(float_of(above)) - divided<255>(float_of(low));
    else
        scale = divided<codec == INT8 ? 127 : codec == E4M3 ? 448 : 57344>(float_of(magnitude));
    scale = scale < SMALLEST ? SMALLEST : scale;
    int zero = 0;
    if constexpr (codec == INT8_ZERO) {
        zero = int(bits_of(-128.0f - float_of(low) / scale + TO_INTEGER) - bits_of(TO_INTEGER));
        zero = none || empty ? 0 : zero < -128 ? -128 : zero > 127 ? 127 : zero;
    }
    return {none ? float_of(0x7fc00000) : empty ? 1.0f : scale, zero, none};
}

// Quotients by one divisor, as good as correctly rounded: they lie below, at or above the same numbers of up to 9 bits,
// which are where codes change. The reciprocal is corrected by its own exact remainder. All divisors were tried, each
// with the values next to every such number; quotients below 2^-40 may be off, and are zero as codes.
struct Divisor {
    float reciprocal, rest;  // 1 / by is reciprocal * (1 + rest)

    OMNIGEMM_BOTH explicit Divisor(float by) {
        reciprocal = reciprocal_of(by);
        const float remainder = fma_of(-reciprocal, by, 1.0f);
        rest = fma_of(remainder, remainder, remainder);
    }
    OMNIGEMM_BOTH float quotient(float value) const { return fma_of(value, reciprocal, value * reciprocal * rest); }
};

// Four integers as bytes, the first in the lowest; each becomes the nearest that a byte holds.
OMNIGEMM_BOTH u32 to_int8x4(int a, int b, int c, int d) {
#ifdef __CUDA_ARCH__
    u32 bytes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(bytes) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(b), "r"(a));
    return bytes;
#else
    const auto byte = [](int one) { return u32(one < -128 ? -128 : one > 127 ? 127 : one) & 255; };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
#endif
}

// Values to codes with one scale, four at a time.
template <Codec codec>
struct Encoder {
    Divisor by;
    int zero;
    u32 mask;  // no bits where all codes are 0

    OMNIGEMM_BOTH explicit Encoder(const Scale& scale)
        : by(scale.value), zero(scale.zero), mask(scale.none ? 0 : ~0u) {}

    // The correction of -0 may make it +0; fp8 keeps its sign.
    OMNIGEMM_BOTH float signed_quotient(float value) const {
        return float_of(bits_of(by.quotient(value)) | (bits_of(value) & 0x80000000));
    }
    // In the last bits.
    OMNIGEMM_BOTH u32 integer(float value) const { return bits_of(by.quotient(value) + TO_INTEGER); }

    OMNIGEMM_BOTH u32 encode(float a, float b, float c, float d) const {
        u32 codes;
        if constexpr (codec == E4M3 || codec == E5M2) {
            codes = to_fp8x4<codec == E4M3 ? 3 : 2>(signed_quotient(a), signed_quotient(b), signed_quotient(c),
                                                    signed_quotient(d));
        } else if constexpr (codec == INT8_ZERO) {
            const int start = zero - int(bits_of(TO_INTEGER));
            codes = to_int8x4(int(integer(a)) + start, int(integer(b)) + start, int(integer(c)) + start,
                              int(integer(d)) + start);
        } else {
            // Quotients stay within 127 and a rounding: nothing to clamp.
            codes = (integer(a) & 255) | (integer(b) & 255) << 8 | (integer(c) & 255) << 16 | integer(d) << 24;
        }
        return codes & mask;
    }
};
