// CUTLASS's int8 matrix product for Hopper as a small shared library, to be measured beside our own kernels.
//
// out[M, N] = bf16(a_scale[M] * (b_scale[N] * (a[M, K] @ b[N, K]^T))), all row-major, scales in float, sums in int32.
//
// build.py compiles this file once per config, with CONFIG set to its index (one kernel takes a minute), and once
// without CONFIG for the functions that callers see.

#ifdef CONFIG
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#endif

// Index, tile of M x N x K, cluster of M x N blocks, schedule. build.py counts these lines.
// clang-format off
#define CONFIGS(X)                             \
    X(0, 128, 128, 128, 2, 1, pingpong)        \
    X(1, 128, 128, 128, 1, 2, cooperative)     \
    X(2, 128, 256, 128, 2, 1, cooperative)     \
    X(3, 128, 256, 128, 1, 2, cooperative)     \
    X(4, 256, 128, 128, 2, 1, cooperative)     \
    X(5, 128, 192, 128, 2, 1, cooperative)     \
    X(6, 64, 128, 128, 1, 1, pingpong)         \
    X(7, 64, 128, 128, 2, 1, pingpong)         \
    X(8, 64, 256, 128, 1, 1, pingpong)         \
    X(9, 64, 64, 128, 1, 2, single)            \
    X(10, 64, 64, 256, 1, 1, single)           \
    X(11, 64, 64, 256, 1, 8, single)
// clang-format on

struct Problem {
    const void *a, *b;
    const float *a_scale, *b_scale;
    void* out;
    int m, n, k;
};

template <int Index>
long long workspace_bytes(const Problem& problem);

template <int Index>
int launch(const Problem& problem, void* workspace, void* stream);

#ifdef CONFIG  // one kernel

using namespace cute;
namespace fusion = cutlass::epilogue::fusion;

struct pingpong {  // two warpgroups, each with a tile of its own, in turns
    using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
    using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct cooperative {  // two warpgroups share a tile
    using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
    using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
struct single {  // one warpgroup, one tile per block: least to set up where there are few tiles
    using Mainloop = cutlass::gemm::KernelTmaWarpSpecialized;
    using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};

template <int Index>
struct Config;

#define TYPES(index, m, n, k, cluster_m, cluster_n, schedule)      \
    template <>                                                    \
    struct Config<index> {                                         \
        using Tile = Shape<Int<m>, Int<n>, Int<k>>;                \
        using Cluster = Shape<Int<cluster_m>, Int<cluster_n>, _1>; \
        using Schedule = schedule;                                 \
    };
CONFIGS(TYPES)

template <class Config>
struct Kernel {
    using Tile = typename Config::Tile;
    using Cluster = typename Config::Cluster;
    using Schedule = typename Config::Schedule;
    using Bf16 = cutlass::bfloat16_t;
    using RowMajor = cutlass::layout::RowMajor;
    using ColumnMajor = cutlass::layout::ColumnMajor;
    static constexpr int kAlignIn = 16, kAlignOut = 8;  // elements in the 16 bytes that TMA asks for

    template <class Out>
    using Multiply = fusion::Sm90Compute<cutlass::multiplies, Out, float, cutlass::FloatRoundStyle::round_to_nearest>;
    // A column of M values for a, a row of N values for b.
    using ScaledByB = fusion::Sm90EVT<Multiply<float>, fusion::Sm90RowBroadcast<0, Tile, float>, fusion::Sm90AccFetch>;
    using Scaled = fusion::Sm90EVT<Multiply<Bf16>, fusion::Sm90ColBroadcast<0, Tile, float>, ScaledByB>;

    // void for C: nothing is added, so nothing is loaded and no shared memory is set aside for it.
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void, RowMajor, kAlignOut, Bf16, RowMajor,
        kAlignOut, typename Schedule::Epilogue, Scaled>::CollectiveOp;

    // What the epilogue leaves of shared memory goes to stages. A row-major [N, K] is a column-major K x N.
    using Stages = cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, RowMajor, kAlignIn, int8_t, ColumnMajor, kAlignIn,
        int32_t, Tile, Cluster, Stages, typename Schedule::Mainloop>::CollectiveOp;

    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
        cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>>;

    static typename Gemm::Arguments arguments(const Problem& p) {
        typename Gemm::Arguments arguments{};
        arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
        arguments.problem_shape = {p.m, p.n, p.k, 1};
        arguments.mainloop.ptr_A = static_cast<const int8_t*>(p.a);
        arguments.mainloop.ptr_B = static_cast<const int8_t*>(p.b);
        arguments.mainloop.dA = {p.k, _1{}, 0};  // of a row, a column, a batch
        arguments.mainloop.dB = {p.k, _1{}, 0};
        arguments.epilogue.ptr_D = static_cast<Bf16*>(p.out);
        arguments.epilogue.dD = {p.n, _1{}, 0};
        // A node's arguments follow those of its children.
        arguments.epilogue.thread = {{p.a_scale}, {{p.b_scale}, {}, {}}, {}};
        // CUTLASS would look these up as well, but of device 0.
        cudaGetDevice(&arguments.hw_info.device_id);
        cudaDeviceGetAttribute(&arguments.hw_info.sm_count, cudaDevAttrMultiProcessorCount,
                               arguments.hw_info.device_id);
        return arguments;
    }
};

template <int Index>
long long workspace_bytes(const Problem& problem) {
    using Kernel = ::Kernel<Config<Index>>;
    return static_cast<long long>(Kernel::Gemm::get_workspace_size(Kernel::arguments(problem)));
}

template <int Index>
int launch(const Problem& problem, void* workspace, void* stream) {
    using Kernel = ::Kernel<Config<Index>>;
    const auto arguments = Kernel::arguments(problem);
    cutlass::Status status = Kernel::Gemm::can_implement(arguments);
    if (status == cutlass::Status::kSuccess)
        status = typename Kernel::Gemm{}.run(arguments, workspace, static_cast<cudaStream_t>(stream));
    return static_cast<int>(status);
}

template long long workspace_bytes<CONFIG>(const Problem&);
template int launch<CONFIG>(const Problem&, void*, void*);

#else  // what callers see

#define EXPORT extern "C" __attribute__((visibility("default")))

#define ENTRY(index, m, n, k, cluster_m, cluster_n, schedule) \
    {#m "x" #n "x" #k " " #cluster_m "x" #cluster_n " " #schedule, &workspace_bytes<index>, &launch<index>},

static const struct {
    const char* name;
    long long (*workspace_bytes)(const Problem&);
    int (*launch)(const Problem&, void*, void*);
} kConfigs[] = {CONFIGS(ENTRY)};

static constexpr int kCount = sizeof(kConfigs) / sizeof(kConfigs[0]);
static constexpr int kInvalid = 11;  // CUTLASS's status for a problem that it can't do

static bool exists(int config) { return 0 <= config && config < kCount; }

EXPORT int cutlass_int8_configs() { return kCount; }

EXPORT const char* cutlass_int8_config_name(int config) { return exists(config) ? kConfigs[config].name : nullptr; }

// Bytes, or -1 if there is no such config.
EXPORT long long cutlass_int8_workspace(int config, int m, int n, int k) {
    return exists(config) ? kConfigs[config].workspace_bytes({nullptr, nullptr, nullptr, nullptr, nullptr, m, n, k})
                          : -1;
}

// 0, or the status of CUTLASS. Neither waits nor allocates, so it can be captured in a graph.
EXPORT int cutlass_int8(int config, const void* a, const void* b, const float* a_scale, const float* b_scale, void* out,
                        int m, int n, int k, void* workspace, void* stream) {
    return exists(config) ? kConfigs[config].launch({a, b, a_scale, b_scale, out, m, n, k}, workspace, stream)
                          : kInvalid;
}

#endif
