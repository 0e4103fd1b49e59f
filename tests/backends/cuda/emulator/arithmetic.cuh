// CUDA's types and functions of numbers.
#pragma once

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __uint_as_float(u32 bits) { return float_of(bits); }
inline float __int_as_float(int bits) { return float_of(bits); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(__builtin_nearbyintf(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float ex2_approx(float x) { return __builtin_exp2f(x); }
inline float rcp_approx(float x) { return 1.0f / x; }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return sum;
}
inline u32 __vmaxu2(u32 a, u32 b) {
    const u32 low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    const u32 high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return low | high << 16;
}
inline u32 __vmaxs2(u32 a, u32 b) { return __vmaxu2(a ^ 0x80008000, b ^ 0x80008000) ^ 0x80008000; }

template <typename T>
T __ldcg(const T* from) {
    return *from;
}
template <typename T>
T __ldg(const T* from) {
    return *from;
}
inline int atomicAdd(int* at, int value) {
    const int before = *at;
    *at += value;
    return before;
}

// Through numbers that hold every half exactly, or are rounded once.
inline float widen_fp16(unsigned short half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const float sign = half & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
    return sign *
           (exponent ? __builtin_ldexpf(1024.0f + mantissa, exponent - 25) : __builtin_ldexpf(float(mantissa), -24));
}
inline unsigned short narrow_fp16(float value) {
    const unsigned short sign = __builtin_signbit(value) ? 0x8000 : 0;
    const float size = __builtin_fabsf(value);
    if (__builtin_isnan(value)) return 0x7fff;
    if (size == 0.0f) return sign;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = 0;
    __builtin_frexpf(size, &exponent);
    const int step = exponent - 11 < -24 ? -24 : exponent - 11;
    const int steps = static_cast<int>(__builtin_nearbyintf(__builtin_ldexpf(size, -step)));
    return static_cast<unsigned short>(sign + (steps + ((step + 24) << 10)));
}
inline u32 rounded_bf16(float value) {
    const u32 bits = bits_of(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return rounded_bf16(low) | rounded_bf16(high) << 16; }
inline u32 pack_fp16(float low, float high) { return narrow_fp16(low) | u32(narrow_fp16(high)) << 16; }
