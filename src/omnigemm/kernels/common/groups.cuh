// Rows in groups, each with a weight of its own, as one list of tiles: a group's tiles are those of a dense product,
// and they follow those of the group before. How many rows a group has is known on the device only. Plain C++: a host
// compiler takes it too, and the tests walk it without a GPU.
//
// The last tiles of a group may have few rows, and then take less time. They come after the whole ones of all groups,
// those with most rows first: when blocks run out of work, what the last ones still have to do is short. Their weights
// are then read from memory once more, so those of a group with few other tiles stay with these.
#pragma once
#include "common/scheduler.cuh"

// A line of the table that each block makes for itself.
struct Group {
    int row_end;   // where its rows end: among all rows if groups follow one another, or else in its own slab
    int tile_end;  // its whole tiles and those of all groups before
};
using GroupNumber = unsigned short;     // GROUP_LIMIT of group_choice.py fits
using ShortPacks = unsigned long long;  // how many there are of each of up to three lengths

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
    int short_rows;                   // with more rows than this a pack takes as long as a whole one; up to 3 GRAIN
    static constexpr int GRAIN = 64;  // rows that are multiplied together
    static constexpr int FEW = 2;

    OMNIGEMM_BOTH int clamped(int value, int before) const {
        const int least = slabs ? 0 : before;
        return value <= least ? least : value < limit ? value : limit;
    }
    OMNIGEMM_BOTH int end(int group, int before) const { return clamped(given[group * stride], before); }
    OMNIGEMM_BOTH int whole_packs(int rows) const {
        const int whole = (rows + rows_each - 1 - short_rows) / rows_each;
        return whole == 0 || whole > FEW ? whole : (rows + rows_each - 1) / rows_each;
    }
    // How long the pack of the rows that are left takes: 0 if there are none.
    OMNIGEMM_BOTH int length(int rows) const {
        const int left = rows - whole_packs(rows) * rows_each;
        return left > 0 ? (left + GRAIN - 1) / GRAIN : 0;
    }
    OMNIGEMM_BOTH int first_row(const Group* table, int group) const {
        return slabs || group == 0 ? 0 : table[group - 1].row_end;
    }

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
            tile += whole_packs(slabs ? stop : stop - row) * col_packs;
            row = stop;
            if (table) table[g] = {stop, tile};
        }
        return tile;
    }

    // Whether a worker's lines are what the numbers give as they are by now. If all workers' are, so is the table:
    // where one group ends is all that the next one needs of those before.
    OMNIGEMM_BOTH bool stands(const Group* table, const volatile int* now, int lane, int lanes) const {
        bool same = true;
#pragma unroll 8
        for (int g = lane; g < count; g += lanes) same &= clamped(now[g], first_row(table, g)) == table[g].row_end;
        return same;
    }

    static OMNIGEMM_BOTH ShortPacks one_of(int length) { return ShortPacks(1) << (20 * (length - 1)); }
    static OMNIGEMM_BOTH int count_of(ShortPacks packs, int length) { return packs >> (20 * (length - 1)) & 0xfffff; }

    // Once the lines are there: a worker's short packs, and their places in the list of such. `list` begins with how
    // many there are; `before` are those of the workers before, `all` those of all.
    OMNIGEMM_BOTH ShortPacks short_packs(int lane, int lanes, const Group* table) const {
        ShortPacks found = 0;
        for (int g = from(lane, lanes); g < from(lane + 1, lanes); ++g)
            if (const int own = length(table[g].row_end - first_row(table, g))) found += one_of(own);
        return found;
    }
    OMNIGEMM_BOTH void list_short(int lane, int lanes, const Group* table, ShortPacks before, ShortPacks all,
                                  GroupNumber* list) const {
        const int longest = count_of(all, 3), longer = longest + count_of(all, 2);
        if (lane == 0) list[0] = GroupNumber(longer + count_of(all, 1));
        for (int g = from(lane, lanes); g < from(lane + 1, lanes); ++g) {
            const int own = length(table[g].row_end - first_row(table, g));
            if (own == 0) continue;
            const int at = (own == 3 ? 0 : own == 2 ? longest : longer) + count_of(before, own);
            list[1 + at] = GroupNumber(g);
            before += one_of(own);
        }
    }
    OMNIGEMM_BOTH int total(const Group* table, const GroupNumber* list) const {
        return table[count - 1].tile_end + (short_rows > 0 ? list[0] * col_packs : 0);
    }

    // The tile with that number in the list of all. `by_columns`: a tile's columns are rows of the group (operands are
    // swapped).
    OMNIGEMM_BOTH GroupTile tile(const Group* table, const GroupNumber* list, int index, int band,
                                 bool by_columns) const {
        if (short_rows > 0 && index >= table[count - 1].tile_end) {
            const int at = index - table[count - 1].tile_end, group = list[1 + at / col_packs];
            const int first = first_row(table, group), rows = table[group].row_end - first;
            return {{whole_packs(rows), at % col_packs}, group, first, rows};
        }
        int group = 0;
        for (int last = count - 1; group < last;) {
            const int middle = (group + last) / 2;
            if (table[middle].tile_end > index)
                last = middle;
            else
                group = middle + 1;
        }
        const int first = first_row(table, group), rows = table[group].row_end - first;
        const int down = whole_packs(rows), inside = index - (group > 0 ? table[group - 1].tile_end : 0);
        return {by_columns ? dense_tile(inside, col_packs, down, band) : dense_tile(inside, down, col_packs, band),
                group, first, rows};
    }
};

// Of a list whose first ones take longest, every block takes one; then they choose in the opposite order, and so on.
OMNIGEMM_BOTH int there_and_back(int index, int blocks) { return 2 * blocks * (index / blocks + 1) - 1 - index; }
