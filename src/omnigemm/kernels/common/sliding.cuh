// Numbers that begin at any multiple of 4 bytes, in reads of 16. Plain C++: a host compiler takes it too, and the tests
// walk it without a GPU.
#pragma once
#include "common/both.cuh"

struct alignas(16) FourScales {
    float x, y, z, w;
};

// The scales of a row, four after four: what was read too early is kept for the next four. One by one they would take
// four times as long on the way to shared memory, which is also that of the operands. The first and the last 16 bytes
// may reach beyond the row, and then lie in the memory that it is a part of, whose owners begin and end at such.
struct Sliding {
    u32 from;  // the next four, counted from an origin that many rows have: there are registers for no more
    FourScales had;

    OMNIGEMM_BOTH u32 shift(const float* origin) const { return (static_cast<u32>(u64(origin) / 4) + from) % 4; }
    OMNIGEMM_BOTH FourScales read(const float* origin) const {
        return *reinterpret_cast<const FourScales*>(origin + from - shift(origin));
    }

    // A row that has some.
    OMNIGEMM_BOTH void begin(const float* origin, u32 row) {
        from = row;
        had = read(origin);
    }
    // `left`: how many the row still has. Those behind them are anything.
    OMNIGEMM_BOTH void next(const float* origin, float (&values)[4], u32 left) {
        const u32 by = shift(origin);
        from += 4;
        const FourScales more = left > 4 - by ? read(origin) : FourScales{};
        // By one, by two, or both: no index that is known only when it runs, for that takes memory.
        const bool one = by % 2, two = by / 2;
        const float a = one ? had.y : had.x, b = one ? had.z : had.y, c = one ? had.w : had.z;
        const float d = one ? more.x : had.w, e = one ? more.y : more.x, f = one ? more.z : more.y;
        values[0] = two ? c : a, values[1] = two ? d : b, values[2] = two ? e : c, values[3] = two ? f : d;
        had = more;
    }
};
