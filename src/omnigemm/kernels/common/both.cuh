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
#endif
