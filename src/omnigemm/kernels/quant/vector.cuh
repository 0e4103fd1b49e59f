// Values on their way from and to memory, 16 bytes of them at a time. IN_TYPE is their type. ALIGNED says that rows
// begin at multiples of 16 bytes and hold whole vectors; if not, values and codes move one by one.
#pragma once
#include "common/ptx.cuh"
#include "quant/codec.cuh"

enum : int { BF16, FP16, FP32 };

constexpr int VALUE_BYTES = IN_TYPE == FP32 ? 4 : 2;
constexpr int VALUES = 16 / VALUE_BYTES;

// Two numbers in a word, rounded as torch rounds.
__device__ __forceinline__ u32 narrow_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    return pack_bf16(low, high);
#else
    const auto narrow = [](float value) {
        const u32 bits = bits_of(value);
        return (bits & 0x7fffffff) > INFINITE ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return narrow(low) | narrow(high) << 16;
#endif
}

struct Vector {
    u32 word[4];

    __device__ __forceinline__ float value(int i) const {
        if constexpr (IN_TYPE == FP32) return float_of(word[i]);
        const u32 pair = word[i / 2];
        if constexpr (IN_TYPE == FP16) return widen_fp16(static_cast<unsigned short>(pair >> i % 2 * 16));
        return float_of(i % 2 ? pair & 0xffff0000 : pair << 16);
    }
    // Rounded to the type of values; i is even.
    __device__ __forceinline__ void set_two(int i, float first, float second) {
        if constexpr (IN_TYPE == FP32)
            word[i] = bits_of(first), word[i + 1] = bits_of(second);
        else
            word[i / 2] = IN_TYPE == FP16 ? u32(narrow_fp16(first)) | u32(narrow_fp16(second)) << 16
                                          : narrow_bf16x2(first, second);
    }
    template <Codec codec>
    __device__ __forceinline__ void measure(Span& span) const {
        if constexpr (IN_TYPE == FP32) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) span.include<codec>(value(i));
        } else if constexpr (codec == INT8_ZERO) {
            const u32 high = __vmaxs2(__vmaxs2(word[0], word[1]), __vmaxs2(word[2], word[3]));
            const u32 low = __vmaxu2(__vmaxu2(word[0], word[1]), __vmaxu2(word[2], word[3]));
            span.include<codec>(0, widened(__vmaxs2(high, high >> 16)), widened(__vmaxu2(low, low >> 16)));
        } else {
            const u32 most = __vmaxu2(__vmaxu2(word[0] & 0x7fff7fff, word[1] & 0x7fff7fff),
                                      __vmaxu2(word[2] & 0x7fff7fff, word[3] & 0x7fff7fff));
            span.include<codec>(widened(__vmaxu2(most, most >> 16)), 0, 0);
        }
    }
    // Bits of 16-bit numbers are in order, too: two are compared at a time, and only the largest is widened, from the
    // lower half. The sign of a NaN is kept.
    static __device__ __forceinline__ u32 widened(u32 pair) {
        if constexpr (IN_TYPE == FP16)
            return bits_of(widen_fp16(static_cast<unsigned short>(pair))) | (pair & 0x8000) << 16;
        return pair << 16;
    }
};

// `fresh`: from L2, past what L1 may still hold from before the kernel.
template <bool fresh, typename Word>
__device__ __forceinline__ Word load(const char* from) {
    const Word* word = reinterpret_cast<const Word*>(from);
    return fresh ? __ldcg(word) : *word;
}

// Of a row of k values, those that begin at `first`; past the end there are zeros.
template <bool fresh = false>
__device__ __forceinline__ Vector load_vector(const char* row, long long first, long long k) {
    Vector v{};
    if constexpr (ALIGNED) {
        if (first < k) {
            const uint4 words = load<fresh, uint4>(row + first * VALUE_BYTES);
            v.word[0] = words.x, v.word[1] = words.y, v.word[2] = words.z, v.word[3] = words.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            if (first + i >= k) break;
            const char* from = row + (first + i) * VALUE_BYTES;
            if constexpr (IN_TYPE == FP32)
                v.word[i] = load<fresh, u32>(from);
            else
                v.word[i / 2] |= u32(load<fresh, unsigned short>(from)) << i % 2 * 16;
        }
    }
    return v;
}

__device__ __forceinline__ void store_vector(char* row, long long first, long long k, const Vector& v) {
    if constexpr (ALIGNED) {
        if (first < k)
            *reinterpret_cast<uint4*>(row + first * VALUE_BYTES) = {v.word[0], v.word[1], v.word[2], v.word[3]};
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            if (first + i >= k) break;
            char* to = row + (first + i) * VALUE_BYTES;
            if constexpr (IN_TYPE == FP32)
                *reinterpret_cast<u32*>(to) = v.word[i];
            else
                *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(v.word[i / 2] >> i % 2 * 16);
        }
    }
}

// The codes of a vector, or of anything with as many values, into a row of k codes.
template <Codec codec, typename Piece>
__device__ __forceinline__ void store_codes(char* row, long long first, long long k, const Piece& piece,
                                            const Encoder<codec>& encoder) {
    u32 words[VALUES / 4];
#pragma unroll
    for (int i = 0; i < VALUES / 4; ++i)
        words[i] =
            encoder.encode(piece.value(4 * i), piece.value(4 * i + 1), piece.value(4 * i + 2), piece.value(4 * i + 3));
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (first + i < k) row[first + i] = static_cast<char>(words[i / 4] >> i % 4 * 8);
    } else if (first < k) {
        if constexpr (VALUES == 8)
            *reinterpret_cast<uint2*>(row + first) = {words[0], words[1]};
        else
            *reinterpret_cast<u32*>(row + first) = words[0];
    }
}
