// Groups that follow one another along K: where each begins, and in which order they are worked on. Plain C++: a host
// compiler takes it too, and the tests walk it without a GPU.
#pragma once
#include "common/groups.cuh"

struct KGroups {
    const int* ends;  // of all groups up to the last of this list: ascending, none beyond the last row
    int first, here;  // the groups of this list

    OMNIGEMM_BOTH int begin(int group) const { return group > 0 ? ends[group - 1] : 0; }
    OMNIGEMM_BOTH int rows(int group) const { return ends[group] - begin(group); }

    // Whether a group begins or ends within a block of K. All rows may end there.
    OMNIGEMM_BOTH bool shares_block(int group, int block, int total) const {
        return (begin(group) % block && begin(group) != total) || (ends[group] % block && ends[group] != total);
    }

    // How many of a worker's share of the list, every `lanes`-th group, come before that group: those with more rows,
    // and of equals the earlier ones. Long tiles first, so that the last ones, for which not all blocks have work, are
    // short.
    OMNIGEMM_BOTH int before(int group, int lane, int lanes) const {
        const int own = rows(group);
        int found = 0;
        for (int other = first + lane; other < first + here; other += lanes) {
            const int theirs = rows(other);
            found += theirs > own || (theirs == own && other < group);
        }
        return found;
    }
};
