// How tiles go from the thread that loads to the warps that work on them, in gemm.cuh's order, without loads and
// products.
#pragma once

template <class Work>
void load_tiles(const Work& work) {
    int index = work.first_to_load();
    if (work.has(index)) work.to_load(index);
    while (work.has(index)) {
        index = work.next_to_load(work.ask(index));
        if (work.has(index)) work.to_load(index);
    }
}

// `see` gets every tile, once for each warp.
template <class Work, class See>
void take_tiles(const Work& work, See see) {
    for (int index = work.first(); work.has(index); index = work.next(index)) {
        const auto tile = work.tile(index);
        work.leave();
        if (threadIdx.x % 32 == 0) see(tile);
    }
}
