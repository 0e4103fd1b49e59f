// Thin wrappers, each named after the instruction that it is.
#pragma once
#include "common/both.cuh"

// What cuTensorMapEncodeTiled fills in; NVRTC knows no cuda.h.
struct alignas(64) TensorMap {
    char opaque[128];
};

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// The same place in another block of the cluster.
__device__ __forceinline__ u32 mapa(const void* pointer, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(pointer)), "r"(rank));
    return address;
}

__device__ __forceinline__ void mbarrier_arrive_in(u64* barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(barrier, rank)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx_in(u64* barrier, u32 bytes, u32 rank) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(mapa(barrier, rank)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(smem_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ bool mbarrier_test(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

// These stay where they are written: the compiler would read before a product is begun, and begin it late.
__device__ __forceinline__ float2 ld_shared_v2(const float* source) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem_address(source)) : "memory");
    return v;
}

__device__ __forceinline__ float4 ld_shared_v4(const float* source) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(smem_address(source))
                 : "memory");
    return v;
}

__device__ __forceinline__ void st_shared_v2(void* target, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address(target)), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Relaxed: says that a block has come this far, and orders no memory accesses. Barriers that were initialised before
// have a fence of their own.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Into the shared memory of a block of the cluster, whose barrier counts the 16 bytes.
__device__ __forceinline__ void st_async_v4(u32 target, float a, float b, float c, float d, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
        : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void st_async(u32 target, int value, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(target),
                 "r"(value), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A map in shared memory is changed field by field, and then copied, by a whole warp, to where the copy engine reads
// it.
__device__ __forceinline__ void tensormap_replace_global_address(TensorMap* map, u64 address) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(smem_address(map)),
                 "l"(address)
                 : "memory");
}

template <int dimension>
__device__ __forceinline__ void tensormap_replace_global_dim(TensorMap* map, u32 size) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(smem_address(map)),
                 "n"(dimension), "r"(size)
                 : "memory");
}

template <int dimension>
__device__ __forceinline__ void tensormap_replace_global_stride(TensorMap* map, u64 bytes) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;" ::"r"(smem_address(map)),
                 "n"(dimension), "l"(bytes)
                 : "memory");
}

__device__ __forceinline__ void tensormap_cp_fenceproxy(TensorMap* target, const TensorMap* map) {
    asm volatile(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(
            __cvta_generic_to_global(target)),
        "r"(smem_address(map))
        : "memory");
}

__device__ __forceinline__ void fence_proxy_tensormap_acquire(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(void* target, const TensorMap* map, u64* barrier, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem_address(target)),
        "l"(map), "r"(smem_address(barrier)), "r"(inner), "r"(outer)
        : "memory");
}

__device__ __forceinline__ void tma_load_2d_multicast(void* target, const TensorMap* map, u64* barrier, int inner,
                                                      int outer, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%3, "
        "%4}], [%2], %5;" ::"r"(smem_address(target)),
        "l"(map), "r"(smem_address(barrier)), "r"(inner), "r"(outer), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_store_2d(const TensorMap* map, const void* source, int inner, int outer) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(smem_address(source)), "r"(inner), "r"(outer)
                 : "memory");
}

// The same of a map with a third dimension: a box of the matrix with that number.
__device__ __forceinline__ void tma_load_3d(void* target, const TensorMap* map, u64* barrier, int inner, int outer,
                                            int number) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(smem_address(target)),
        "l"(map), "r"(smem_address(barrier)), "r"(inner), "r"(outer), "r"(number)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d_multicast(void* target, const TensorMap* map, u64* barrier, int inner,
                                                      int outer, int number, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%3, %4, %5}], [%2], %6;" ::"r"(smem_address(target)),
        "l"(map), "r"(smem_address(barrier)), "r"(inner), "r"(outer), "r"(number), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* source, int inner, int outer,
                                             int number) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(smem_address(source)), "r"(inner), "r"(outer), "r"(number)
                 : "memory");
}

// To what is there, element by element; of which type, the map says. Nothing comes back.
__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap* map, const void* source, int inner, int outer) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(smem_address(source)), "r"(inner), "r"(outer)
        : "memory");
}

__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void stmatrix_x4(void* target, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(target)), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ u32 pack_fp16(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float widen_fp16(unsigned short half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
}

__device__ __forceinline__ unsigned short narrow_fp16(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// Off by a unit or two in the last place; subnormal numbers are 0.
__device__ __forceinline__ float ex2_approx(float value) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
}

__device__ __forceinline__ float rcp_approx(float value) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
    return reciprocal;
}

// A shared-memory matrix as wgmma reads it: lines of 128 bytes, 128-byte swizzle, 8 lines every 1024 bytes. A line is a
// row of the matrix, or if it is turned, 64 rows of one place of K; the next 64 rows then lie 64 lines further. The
// address is in units of 16 bytes, so that descriptors of matrices further on are made by addition; what tells the
// blocks of a cluster apart is no part of it.
__device__ __forceinline__ u64 wgmma_descriptor(const void* tile, bool turned) {
    return ((smem_address(tile) & 0x3ffff) >> 4) | (u64(turned ? 64 * 128 >> 4 : 1) << 16) | (u64(1024 >> 4) << 32) |
           (u64(1) << 62);
}
// By its lower half: the upper one is the same for all.
__device__ __forceinline__ u64 wgmma_descriptor(u32 lower) { return u64(1024 >> 4 | 1 << 30) << 32 | lower; }
__device__ __forceinline__ u64 wgmma_descriptor(u64 whole) { return whole; }

// The warp's lanes agree on the value; the compiler then keeps it in a uniform register.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// The value is computed here, and not again where it is needed.
__device__ __forceinline__ void computed(int& value) { asm volatile("" : "+r"(value)); }
