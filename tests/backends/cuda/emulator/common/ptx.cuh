// A Hopper GPU on a processor, as far as our kernels use one: it takes the place of the wrappers of the same name, so
// that a C++ compiler of the host takes the kernels as they are. README.md says what it finds out, and what it cannot.
#pragma once
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "common/both.cuh"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // of kernels whose blocks do not run side by side; others have memory of the launch's size

#include "arithmetic.cuh"
#include "threads.cuh"
#include "meetings.cuh"
#include "copy_engine.cuh"
#include "tensor_cores.cuh"

// Instructions are taken out, and of the wrappers themselves those are used that have none: what is worked out on the
// way to an instruction.
#define asm(...)
#define volatile(...) ("")
namespace wrappers {
#include_next "common/ptx.cuh"
}
using wrappers::computed;
using wrappers::smem_address;
using wrappers::uniform;
using wrappers::wgmma_descriptor;
