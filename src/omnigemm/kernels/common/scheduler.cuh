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

// Dense products: bands of `band` column tiles, taken row by row, so that blocks that run together share operands in
// L2.
OMNIGEMM_BOTH Tile dense_tile(int index, int rows, int cols, int band) {
    const int per_band = band * rows;
    const int first = index / per_band * band;
    const int inside = index % per_band;
    const int width = band < cols - first ? band : cols - first;
    return {inside / width, first + inside % width};
}

// Batches of such products: the tiles of one after those of the other.
OMNIGEMM_BOTH BatchTile batch_tile(int index, int rows, int cols, int band) {
    const int each = rows * cols, product = index / each;
    return {dense_tile(index - product * each, rows, cols, band), product};
}
