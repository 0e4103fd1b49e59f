// For code that the device and a host compiler both take, so that tests walk it without a GPU. On both sides it is IEEE
// fp32: kernels that share it with the host are compiled with --fmad=false, and say fma where they mean it.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

#ifdef __CUDACC__
#define OMNIGEMM_BOTH __host__ __device__ __forceinline__
#else
#define OMNIGEMM_BOTH inline
#endif

#ifdef __CUDA_ARCH__
OMNIGEMM_BOTH u32 bits_of(float value) { return __float_as_uint(value); }
OMNIGEMM_BOTH float float_of(u32 bits) { return __uint_as_float(bits); }
OMNIGEMM_BOTH float fma_of(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// 1 / value, correctly rounded for sizes from 2^-126 to 2^125: what a division begins with where it asks for no more.
OMNIGEMM_BOTH float reciprocal_of(float value) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(value));
    return __fmaf_rn(near, __fmaf_rn(-near, value, 1.0f), near);
}
#else
OMNIGEMM_BOTH u32 bits_of(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
OMNIGEMM_BOTH float float_of(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
OMNIGEMM_BOTH float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
OMNIGEMM_BOTH float reciprocal_of(float value) { return 1.0f / value; }
#endif
