// The formulas of docs/quantizers.md: what values span, the scale that follows, and the codes.
#pragma once
#include "quant/fp8.cuh"

enum Codec : int { INT8, INT8_ZERO, E4M3, E5M2 };

constexpr u32 INFINITE = 0x7f800000;
constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: added to a number below 2^22, it rounds it to an integer

// What the values that share a scale span, 0 included. Magnitudes are compared as integers: the order of the bits is
// that of the numbers, with infinity and then NaN above them, and the largest is the same in whatever order.
struct Span {
    u32 magnitude = 0;
    float high = 0.0f, low = 0.0f;  // for INT8_ZERO only

    OMNIGEMM_BOTH void include_magnitude(u32 bits) { magnitude = bits > magnitude ? bits : magnitude; }
    OMNIGEMM_BOTH void include_value(float value) {
        high = value > high ? value : high;
        low = value < low ? value : low;
    }
    template <Codec codec>
    OMNIGEMM_BOTH void include(float value) {
        include_magnitude(bits_of(value) & 0x7fffffff);
        if constexpr (codec == INT8_ZERO) include_value(value);
    }
    template <Codec codec>
    OMNIGEMM_BOTH void include(const Span& other) {
        include_magnitude(other.magnitude);
        if constexpr (codec == INT8_ZERO) {
            include_value(other.high);
            include_value(other.low);
        }
    }
};

struct Scale {
    float value;
    int zero;   // the code of 0, for INT8_ZERO
    bool none;  // an infinity or a NaN is among the values: the scale is NaN and all codes are 0
};

template <Codec codec>
OMNIGEMM_BOTH Scale scale_of(const Span& span) {
    constexpr float SMALLEST = 1.17549435e-38f;  // 2^-126
    if (span.magnitude >= INFINITE) return {float_of(0x7fc00000), 0, true};
    if (span.magnitude == 0) return {1.0f, 0, false};
    if constexpr (codec == INT8_ZERO) {
        float scale = span.high / 255.0f - span.low / 255.0f;
        scale = scale < SMALLEST ? SMALLEST : scale;
        const float zero = (-128.0f - span.low / scale) + TO_INTEGER - TO_INTEGER;
        return {scale, int(zero < -128.0f ? -128.0f : zero > 127.0f ? 127.0f : zero), false};
    } else {
        constexpr float LARGEST = codec == INT8 ? 127.0f : codec == E4M3 ? 448.0f : 57344.0f;
        const float scale = float_of(span.magnitude) / LARGEST;
        return {scale < SMALLEST ? SMALLEST : scale, 0, false};
    }
}

// Correctly rounded quotients by one divisor: a product with the reciprocal, corrected by exact remainders. The first
// correction leaves less than a unit in the last place, from where a second gives the nearest number. For values of 16
// bits (`narrow`) the first does already: all pairs of mantissas were tried.
//
// A remainder is exact if it does not underflow, so small divisors are lifted, values with them. Quotients below 2^-40
// may still be off; as codes they are zero either way.
template <bool narrow>
struct Divisor {
    float lift, scale, reciprocal;

    OMNIGEMM_BOTH explicit Divisor(float by) {
        lift = by < 8.6736174e-19f ? 1.8446744e+19f : 1.0f;  // 2^-60, 2^64
        scale = by * lift;
        reciprocal = 1.0f / scale;
    }
    OMNIGEMM_BOTH float quotient(float value) const {
        value *= lift;
        float q = value * reciprocal;
        q = fma_of(fma_of(-q, scale, value), reciprocal, q);
        return narrow ? q : fma_of(fma_of(-q, scale, value), reciprocal, q);
    }
};

// Values to codes with one scale, four at a time.
template <Codec codec, bool narrow>
struct Encoder {
    Divisor<narrow> by;
    int zero;
    bool none;

    OMNIGEMM_BOTH explicit Encoder(const Scale& scale) : by(scale.value), zero(scale.zero), none(scale.none) {}

    // The remainders of -0 make it +0; fp8 keeps its sign.
    OMNIGEMM_BOTH float signed_quotient(float value) const {
        return float_of(bits_of(by.quotient(value)) | (bits_of(value) & 0x80000000));
    }
    // In the lowest byte. Quotients of INT8 stay within 127 and a rounding, so nothing is clamped.
    OMNIGEMM_BOTH u32 int8(float value) const {
        const u32 code = bits_of(by.quotient(value) + TO_INTEGER);
        if constexpr (codec == INT8) return code & 255;
        const int shifted = int(code - bits_of(TO_INTEGER)) + zero;
        return u32(shifted < -128 ? -128 : shifted > 127 ? 127 : shifted) & 255;
    }
    OMNIGEMM_BOTH u32 encode(float a, float b, float c, float d) const {
        if (none) return 0;
        if constexpr (codec == E4M3 || codec == E5M2)
            return to_fp8x4<codec == E4M3 ? 3 : 2>(signed_quotient(a), signed_quotient(b), signed_quotient(c),
                                                   signed_quotient(d));
        else
            return int8(a) | int8(b) << 8 | int8(c) << 16 | int8(d) << 24;
    }
};
