// Products of unequal sizes as one list of tiles: a product's tiles are those of a dense one, and they follow those of
// the product before. Plain C++: a host compiler takes it too, and the tests walk it without a GPU.
#pragma once
#include "common/scheduler.cuh"

struct Extent {
    int m, n, k;
};

// A size that was given, or the nearest that there is room for: bad numbers give a wrong result, never a bad address.
OMNIGEMM_BOTH int within(int given, int room) { return given <= 0 ? 0 : given < room ? given : room; }

// Tiles of a result, or packs of those that a cluster works on together.
OMNIGEMM_BOTH int packs_of(int m, int n, int rows_each, int cols_each) {
    return (m + rows_each - 1) / rows_each * ((n + cols_each - 1) / cols_each);
}

// A line of the table, in one read.
struct alignas(16) Product {
    int tile_end;  // its tiles and those of all products before; packs of tiles, where a cluster works together
    int m, n, k_blocks;
};

struct Products {
    const Product* table;
    const int* ends;  // its first column once more, where reading is cheap
    int count;
    int rows_each, cols_each;  // of D, in a tile or pack

    // Whose tile that is. `from` is the product of an earlier one, and most often still the right one.
    OMNIGEMM_BOTH int find(int index, int from) const {
        if (ends[from] > index) return from;
        for (int last = count - 1; from < last;) {
            const int middle = (from + last) / 2;
            if (ends[middle] > index)
                last = middle;
            else
                from = middle + 1;
        }
        return from;
    }
    OMNIGEMM_BOTH Tile tile(int index, int which, const Product& one, int band) const {
        const int before = which > 0 ? ends[which - 1] : 0;
        const int rows = (one.m + rows_each - 1) / rows_each, cols = (one.n + cols_each - 1) / cols_each;
        return dense_tile(index - before, rows, cols, even_band(cols, band));
    }
};
