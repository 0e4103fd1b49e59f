// wgmma: each thread makes its own share of a warpgroup's product, from operands in shared memory as descriptors say.
// It is made when it is waited for, or at once: whoever uses sums too early, or gives operands back too early, finds
// others.
#pragma once
#include "meetings.cuh"

namespace emulator {
// The types that instructions name, as numbers to calculate with.
inline float of_e4m3(unsigned char code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float sign = code & 128 ? -1.0f : 1.0f;
    if (exponent == 15 && mantissa == 7) return __builtin_nanf("");
    return sign * (exponent ? __builtin_ldexpf(8.0f + mantissa, exponent - 10) : __builtin_ldexpf(float(mantissa), -9));
}
struct e4m3 {
    using Code = unsigned char;
    using Number = float;
    static Number number(Code code) {
        static float table[256];
        if (table[8] == 0.0f)
            for (int i = 0; i < 256; ++i) table[i] = of_e4m3(i);
        return table[code];
    }
};
struct e5m2 {  // the upper half of an fp16
    using Code = unsigned char;
    using Number = float;
    static Number number(Code code) {
        static float table[256];
        if (table[8] == 0.0f)
            for (int i = 0; i < 256; ++i) table[i] = widen_fp16(i << 8);
        return table[code];
    }
};
struct s8 {
    using Code = signed char;
    using Number = int;
    static Number number(Code code) { return code; }
};
struct bf16 {
    using Code = unsigned short;
    using Number = float;
    static Number number(Code code) { return float_of(u32(code) << 16); }
};
struct f16 {
    using Code = unsigned short;
    using Number = float;
    static Number number(Code code) { return widen_fp16(code); }
};

constexpr int EIGHT = 8;
template <class Number>
struct Vector;
template <>
struct Vector<float> {
    typedef float Of8 __attribute__((vector_size(32)));
};
template <>
struct Vector<int> {
    typedef int Of8 __attribute__((vector_size(32)));
};

// A row of an operand, `depth` of K. Lines of 128 bytes lie in eights, 128-byte swizzled; a line is a row's K, or, if
// the operand is turned, 64 rows at one place of K.
template <class Type, int depth, bool turned>
void read_row(typename Type::Number (&values)[depth], u64 descriptor, int row) {
    using Code = typename Type::Code;
    const u32 first = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    const u32 leading = (descriptor >> 16 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) return fault("an operand that is not 128-byte swizzled");
    const Block& block = *self->block;
    const auto at = [&](u32 address) { return pointer_to(address ^ (address >> 7 & 7) << 4, block); };
    if constexpr (turned) {
        const u32 start = first + row / 64 * leading + row % 64 * sizeof(Code);
        for (int k = 0; k < depth; ++k) {
            Code code;
            memcpy(&code, at(start + k / 8 * stride + k % 8 * 128), sizeof code);
            values[k] = Type::number(code);
        }
    } else {
        const u32 start = first + row / 8 * stride + row % 8 * 128;
        constexpr int CHUNK = 16 / sizeof(Code);
        for (int k = 0; k < depth; k += CHUNK) {
            Code codes[CHUNK];
            memcpy(codes, at(start + k * sizeof(Code)), 16);
            for (int i = 0; i < CHUNK; ++i) values[k + i] = Type::number(codes[i]);
        }
    }
}

template <int columns, int depth, class Left, class Right, bool left_turned, bool right_turned>
void make(const Product& product) {
    using Number = typename Left::Number;
    using Of8 = typename Vector<Number>::Of8;
    Number* sums = static_cast<Number*>(product.sums);
    const int lane = self->index % WARP, row = self->index / WARP % 4 * 16 + lane / 4;
    alignas(32) Number left[2][depth], right[depth];
    for (int half = 0; half < 2; ++half) read_row<Left, depth, left_turned>(left[half], product.left, row + half * 8);
    for (int i = 0; i < columns / 4; ++i) {
        read_row<Right, depth, right_turned>(right, product.right, i / 2 * 8 + lane % 4 * 2 + i % 2);
        for (int half = 0; half < 2; ++half) {
            Of8 some = {};
            for (int k = 0; k < depth; k += EIGHT)
                some += *reinterpret_cast<const Of8*>(&left[half][k]) * *reinterpret_cast<const Of8*>(&right[k]);
            Number& sum = sums[i / 2 * 4 + half * 2 + i % 2];
            if (!product.add) sum = 0;
            for (int k = 0; k < EIGHT; ++k) sum += some[k];
        }
    }
}

// The instruction that a kernel was generated with.
template <int columns, int depth, class Left, class Right, bool left_turned = false, bool right_turned = false,
          int count>
void multiply(typename Left::Number (&sums)[count], u64 left, u64 right, bool add) {
    static_assert(count == columns / 2);
    if (self->products.empty()) self->products.emplace_back();
    self->products.back().push_back(
        {sums, left, right, add, make<columns, depth, Left, Right, left_turned, right_turned>});
}
inline void make_products(size_t but) {
    auto& groups = self->products;
    while (groups.size() > but + 1) {
        for (const Product& one : groups.front()) one.make(one);
        groups.erase(groups.begin());
    }
}
}  // namespace emulator

inline void wgmma_fence() {}
inline void wgmma_commit_group() {
    auto& groups = emulator::self->products;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
    if (emulator::launched.seed % 2) emulator::make_products(0);
    emulator::perhaps_meet();
}
template <int pending>
void wgmma_wait_group() {
    emulator::make_products(pending);
}
template <int registers>
void setmaxnreg_inc() {}
template <int registers>
void setmaxnreg_dec() {}
