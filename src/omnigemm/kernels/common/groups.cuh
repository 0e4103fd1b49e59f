// Rows in groups, each with a weight of its own, as one list of tiles: a group's tiles are those of a dense product,
// and they follow those of the group before. How many rows a group has is known on the device only. Plain C++: a host
// compiler takes it too, and the tests walk it without a GPU.
#pragma once
#include "common/scheduler.cuh"

// A line of the table that each block makes for itself.
struct Group {
    int row_end;   // where its rows end: among all rows if groups follow one another, or else in its own slab
    int tile_end;  // its tiles and those of all groups before
};

// What a tile belongs to, besides its place among the group's tiles.
struct GroupTile {
    Tile tile;
    int group;
    int first;  // the group's first row
    int rows;   // that the group has
};

// How rows are given: `ends`, ascending, or a count of rows for each slab. What lies outside 0 .. limit, or before the
// group's predecessor, is taken as the nearest that does not: bad numbers give wrong rows, never a bad address.
struct Groups {
    const int* given;  // every `stride`-th; may lie where the table's row_end will be
    int stride, count, limit;
    int rows_each, col_packs;  // rows of a tile, or of the tiles that a cluster works on together; and such in a row
    bool slabs;

    OMNIGEMM_BOTH int end(int group, int before) const {
        const int value = given[group * stride], least = slabs ? 0 : before;
        return value <= least ? least : value < limit ? value : limit;
    }
    OMNIGEMM_BOTH int row_packs(int rows) const { return (rows + rows_each - 1) / rows_each; }

    // The table is made by `lanes` workers, each with some groups in a row. What a worker must know of those before it,
    // it gets in between, by a running maximum and a running sum.
    OMNIGEMM_BOTH int from(int lane, int lanes) const {
        const int each = (count + lanes - 1) / lanes;
        return each * lane < count ? each * lane : count;
    }
    // Where the last of a worker's groups ends, at least.
    OMNIGEMM_BOTH int last_end(int lane, int lanes) const {
        int last = 0;
        if (!slabs)
            for (int g = from(lane, lanes); g < from(lane + 1, lanes); ++g) last = end(g, last);
        return last;
    }
    // Its tiles; `table`, if given, gets its lines. `row` and `tile` are where its first group begins.
    OMNIGEMM_BOTH int tiles(int lane, int lanes, int row, int tile, Group* table) const {
        for (int g = from(lane, lanes); g < from(lane + 1, lanes); ++g) {
            const int stop = end(g, row);
            tile += row_packs(slabs ? stop : stop - row) * col_packs;
            row = stop;
            if (table) table[g] = {stop, tile};
        }
        return tile;
    }

    // The tile with that number in the list. `by_columns`: a tile's columns are rows of the group (operands are
    // swapped).
    OMNIGEMM_BOTH GroupTile tile(const Group* table, int index, int band, bool by_columns) const {
        int group = 0;
        for (int last = count - 1; group < last;) {
            const int middle = (group + last) / 2;
            if (table[middle].tile_end > index)
                last = middle;
            else
                group = middle + 1;
        }
        const Group before = group > 0 ? table[group - 1] : Group{0, 0};
        const int first = slabs ? 0 : before.row_end, rows = table[group].row_end - first;
        const int down = row_packs(rows), inside = index - before.tile_end;
        return {by_columns ? dense_tile(inside, col_packs, down, band) : dense_tile(inside, down, col_packs, band),
                group, first, rows};
    }
};
