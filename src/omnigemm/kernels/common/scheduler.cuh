// Which tile a block works on next. Plain C++: a host compiler takes it too, and the tests walk it without a GPU.
#pragma once
#include "common/both.cuh"

struct Tile {
    int row, col;
};

struct BatchTile {
    Tile tile;
    int product;
};

// Divides by a number that is known beforehand. A division takes some 65 instructions, most of which wait for the one
// before, and loads and products then wait for it.
struct Divisor {
    u32 by, inverse;  // 2^32 / by, at most

    OMNIGEMM_BOTH explicit Divisor(int by) : by(by), inverse(by > 1 ? ~0u / by : ~0u) {}
    // Of a number that is not negative.
    OMNIGEMM_BOTH int quotient(int number) const {
        const u32 near = static_cast<u64>(number) * inverse >> 32;  // that, or one less
        return near + (number - near * by >= by);
    }
};

// Dense products: bands of `band` column tiles, taken row by row, so that blocks that run together share operands in
// L2. `in_band` is how many tiles a band has.
OMNIGEMM_BOTH Tile dense_tile(int index, int rows, int cols, int band, const Divisor& in_band) {
    // With few rows there is one row of tiles, or one column.
    if (rows == 1) return {0, index};
    if (cols == 1) return {index, 0};
    const int first = in_band.quotient(index) * band, inside = index - first * rows, width = cols - first;
    if (width >= band) return {inside / band, first + inside % band};  // by a constant, in kernels
    return {inside / width, first + inside % width};
}
OMNIGEMM_BOTH Tile dense_tile(int index, int rows, int cols, int band) {
    if (rows == 1) return {0, index};
    if (cols == 1) return {index, 0};
    return dense_tile(index, rows, cols, band, Divisor(band * rows));
}
// So many bands as it takes, but all about as wide: tiles of a narrow one that is left over share little.
OMNIGEMM_BOTH int even_band(int cols, int band) {
    const int bands = (cols + band - 1) / band;
    return (cols + bands - 1) / bands;
}

// Batches of such products: the tiles of one, of which `in_product` is the number, after those of the other.
OMNIGEMM_BOTH BatchTile batch_tile(int index, int rows, int cols, int band, const Divisor& in_band,
                                   const Divisor& in_product) {
    const int product = in_product.quotient(index);
    return {dense_tile(index - product * rows * cols, rows, cols, band, in_band), product};
}
