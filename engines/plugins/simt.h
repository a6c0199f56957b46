// One source, two compilers: CUDA for the GPU, and plain host C++ so that a kernel's results are tested without a GPU.
//
// A kernel file includes this header, launches with SIMT_LAUNCH and asks last_error() how that went. Under nvcc both
// are CUDA's own. Under g++ a CUDA thread is a fiber (ucontext), and all run on one OS thread: a fiber runs until it
// needs others, at __syncthreads or at a warp's shuffle or ballot, and goes on once all of those have come. What this
// keeps exact: barriers, values that lanes exchange, shared memory. What it refuses, with an error and not a hang: a
// barrier that some threads never reach. What it cannot show: races inside the same stretch between two barriers;
// SIMT_BACKWARDS runs fibers in the opposite order, so that a missing barrier gives a different answer in one of them.
#pragma once

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define SIMT_FOR(i, count) _Pragma("unroll") for (unsigned i = 0; i < (count); ++i)  // of registers: never a loop
#define SIMT_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
inline int last_error() { return static_cast<int>(cudaGetLastError()); }
inline int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}
__device__ __forceinline__ float power_of_two(float x) {  // one instruction; below 2^-126 it is 0
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
}
__device__ __forceinline__ float half_to_float(unsigned short bits) { return __half2float(__ushort_as_half(bits)); }
__device__ __forceinline__ unsigned short float_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }

#else

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define SIMT_FOR(i, count) for (unsigned i = 0; i < (count); ++i)
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __shared__ static  // one block runs at a time, so its threads are the only ones that see it

using cudaStream_t = void*;
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10;
constexpr int INVALID_CONFIGURATION = 9, LAUNCH_FAILURE = 719;  // cudaErrorInvalidConfiguration, ...LaunchFailure

enum class Waits { nothing, warp, block, done };

struct Thread {
    ucontext_t context;  // where it starts; from then on
    jmp_buf place;       // is where it is: a jump, unlike swapcontext, asks nothing of the operating system
    bool started;
    dim3 index;
    Waits waits;
    unsigned turn;       // warp exchanges so far
    unsigned offered[2]; // what it shows to its warp; two, as a fast lane may offer again before a slow one has read
};

inline std::vector<Thread> threads;
inline std::unique_ptr<char[]> stacks;
inline size_t stacks_for = 0;
inline unsigned current;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline dim3 block_index, block_dim, grid_dim;
inline int error = 0;

inline void wait_for(Waits what) {
    Thread& self = threads[current];
    self.waits = what;
    if (!_setjmp(self.place)) _longjmp(scheduler, 1);
}

inline void resume(unsigned thread) {
    current = thread;
    Thread& self = threads[thread];
    if (_setjmp(scheduler)) return;
    if (self.started) _longjmp(self.place, 1);
    self.started = true;
    setcontext(&self.context);
}

inline void run_fiber() {
    kernel();
    wait_for(Waits::done);
}

// Shows `value` to the warp; returns when all 32 lanes have shown theirs, each to be read with `lane_value`.
inline unsigned exchange(unsigned value) {
    Thread& self = threads[current];
    unsigned slot = self.turn++ & 1;
    self.offered[slot] = value;
    wait_for(Waits::warp);
    return slot;
}
inline unsigned lane_value(unsigned slot, unsigned lane) { return threads[current / WARP * WARP + lane].offered[slot]; }

template <class T>
T shuffle(T value, unsigned from) {
    static_assert(sizeof(T) == sizeof(unsigned), "lanes exchange 32 bits");
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = lane_value(exchange(bits), from);
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

// True where threads [first, last) all wait for `what`.
inline bool all_wait(unsigned first, unsigned last, Waits what) {
    for (unsigned i = first; i < last; ++i)
        if (threads[i].waits != what) return false;
    return true;
}
inline void release(unsigned first, unsigned last) {
    for (unsigned i = first; i < last; ++i) threads[i].waits = Waits::nothing;
}

inline void run_warp(unsigned first) {
    do {
        release(first, first + WARP);
        for (unsigned i = 0; i < WARP; ++i) {
#ifdef SIMT_BACKWARDS
            resume(first + WARP - 1 - i);
#else
            resume(first + i);
#endif
        }
    } while (all_wait(first, first + WARP, Waits::warp));
}

// False where some threads wait for others that will never come.
inline bool run_block() {
    unsigned count = threads.size();
    for (unsigned i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.waits = Waits::nothing;
        thread.turn = 0;
        thread.started = false;
        thread.index = dim3(i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks.get() + i * STACK;
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, run_fiber, 0);
    }
    do {
        for (unsigned warp = 0; warp < count; warp += WARP) {
#ifdef SIMT_BACKWARDS
            run_warp(count - WARP - warp);
#else
            run_warp(warp);
#endif
        }
    } while (all_wait(0, count, Waits::block));
    return all_wait(0, count, Waits::done);
}

inline void launch(dim3 grid, dim3 block, std::function<void()> body) {
    unsigned count = block.x * block.y * block.z;
    if (count == 0 || count % WARP || count > 1024) {
        error = INVALID_CONFIGURATION;
        return;
    }
    grid_dim = grid, block_dim = block, kernel = std::move(body);
    threads.resize(count);
    if (stacks_for < count) stacks.reset(new char[count * STACK]), stacks_for = count;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z && !error; ++i) {
        block_index = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        if (!run_block()) error = LAUNCH_FAILURE;
    }
}

}  // namespace simt

#define threadIdx (simt::threads[simt::current].index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)
#define SIMT_LAUNCH(kernel, grid, block, stream, ...) \
    ((void)(stream), simt::launch(grid, block, [=] { kernel(__VA_ARGS__); }))

// As cudaGetLastError: tells once, then forgets.
inline int last_error() {
    int code = simt::error;
    simt::error = 0;
    return code;
}

#ifndef SIMT_MULTIPROCESSORS
#define SIMT_MULTIPROCESSORS 16
#endif
inline int multiprocessors() { return SIMT_MULTIPROCESSORS; }

// Masks are taken to be full: a kernel here keeps its whole warp together.
inline void __syncthreads() { simt::wait_for(simt::Waits::block); }
inline unsigned __ballot_sync(unsigned, bool yes) {
    unsigned slot = simt::exchange(yes), ballot = 0;
    for (unsigned lane = 0; lane < simt::WARP; ++lane) ballot |= simt::lane_value(slot, lane) << lane;
    return ballot;
}
inline int __any_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
inline unsigned __match_any_sync(unsigned, unsigned value) {
    unsigned slot = simt::exchange(value), equal = 0;
    for (unsigned lane = 0; lane < simt::WARP; ++lane) equal |= unsigned(simt::lane_value(slot, lane) == value) << lane;
    return equal;
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned from) {
    return simt::shuffle(value, from % simt::WARP);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return simt::shuffle(value, simt::current % simt::WARP ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by) {  // past the last lane a lane reads itself
    unsigned lane = simt::current % simt::WARP;
    return simt::shuffle(value, lane + by < simt::WARP ? lane + by : lane);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {  // selectors 0..7, of bytes of high:low
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned out = 0;
    for (unsigned i = 0; i < 4; ++i) out |= (both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
inline float power_of_two(float x) { return std::exp2(x); }

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
template <class T>
T __ldg(const T* from) {
    return *from;
}

namespace simt {
template <class To, class From>
To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits, in another type");
    To bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
}  // namespace simt
inline unsigned __float_as_uint(float x) { return simt::bits_of<unsigned>(x); }
inline float __uint_as_float(unsigned bits) { return simt::bits_of<float>(bits); }
inline float half_to_float(unsigned short bits) { return simt::bits_of<_Float16>(bits); }
inline unsigned short float_to_half(float x) { return simt::bits_of<unsigned short>(static_cast<_Float16>(x)); }
inline unsigned atomicAdd(unsigned* where, unsigned what) {
    unsigned before = *where;
    *where += what;
    return before;
}

#endif

// The same number, of which the compiler knows nothing: what follows from it is computed there, and not ahead of a loop
// in registers that the loop needs.
__device__ __forceinline__ unsigned opaque(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
