// Kernel of the operator unicache::TopKGather: the k best tokens of every head, in their original order.
//
// What it computes is stated by `topk_gather` in export/operators.py: of equal scores the lowest index wins, indices
// ascend, rows are copied byte for byte. Any k <= tokens, where TensorRT's own TopK stops at 3840.
//
// Radix select: a float becomes an unsigned integer of the same order, and the k-th largest integer (the threshold) is
// found a digit of 8 bits at a time: a histogram of the digit, over the tokens that agree with all digits found so
// far, tells in which bin the k-th lies. Four readings of the scores, whatever the data. All above the threshold are
// kept, and the first of those that equal it. Nothing is sorted: tokens are written in the order they are met.
#include <stdint.h>

#include "kernels.h"
#include "simt.h"

// Tests only: the rank of the tie that is kept first. A build with 1 is wrong, and the parity test must say so.
#ifndef TIE_SHIFT
#define TIE_SHIFT 0
#endif

namespace {

constexpr unsigned WARP = 32, WARPS = 32, THREADS = WARP * WARPS, ALL_LANES = 0xffffffffu;
constexpr unsigned DIGIT = 8, BINS = 1 << DIGIT, NO_BIN = BINS;
constexpr unsigned GATHER_THREADS = 256, TENSORS = 4;

// Integers in the order of the floats. The two zeros are equal; NaN, of either sign, is above all, as in PyTorch's
// sort; 0 is no score's. On bits alone, so that no compiler flag (flush to zero, fast math) changes what is kept.
__device__ __forceinline__ unsigned ordered(float score) {
    unsigned bits = __float_as_uint(score), magnitude = bits << 1;
    if (magnitude > 0xff000000u) return 0xffffffffu;
    if (magnitude == 0) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Called by one warp: the bin that holds the `left`-th token from the top, and how many tokens are in bins above it.
__device__ void find_bin(const unsigned* histogram, unsigned left, unsigned* bin, unsigned* above_bin) {
    constexpr unsigned EACH = BINS / WARP;
    unsigned lane = threadIdx.x % WARP, own = 0;
    for (unsigned i = 0; i < EACH; ++i) own += histogram[lane * EACH + i];
    unsigned from_here = own;  // tokens in this lane's bins and all above: a scan from the last lane down
    for (unsigned by = 1; by < WARP; by *= 2) {
        unsigned next = __shfl_down_sync(ALL_LANES, from_here, by);
        if (lane + by < WARP) from_here += next;
    }
    unsigned above = from_here - own;
    if (above >= left || from_here < left) return;  // exactly one lane stays
    unsigned i = EACH - 1;
    while (above + histogram[lane * EACH + i] < left) above += histogram[lane * EACH + i--];
    *bin = lane * EACH + i;
    *above_bin = above;
}

// One block a head. score [heads, tokens] -> index [heads, k], ascending.
__global__ void __launch_bounds__(THREADS)
select_best(const float* __restrict__ score, unsigned tokens, unsigned k, int64_t* __restrict__ index) {
    __shared__ unsigned histogram[BINS], bin, above_bin, above_in[WARPS], ties_in[WARPS];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    score += static_cast<int64_t>(blockIdx.x) * tokens;
    index += static_cast<int64_t>(blockIdx.x) * k;

    unsigned threshold = 0, left = k;  // left: how many are kept of the tokens that agree with the digits so far
    for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
        if (threadIdx.x < BINS) histogram[threadIdx.x] = 0;
        __syncthreads();
        // Loops run a warp at a time, also past the last token: a warp's votes need all its lanes.
        for (unsigned first = warp * WARP; first < tokens; first += THREADS) {
            unsigned i = first + lane, digit = NO_BIN;
            if (i < tokens) {
                unsigned key = ordered(score[i]);
                bool agrees = static_cast<uint64_t>(key ^ threshold) >> (shift + DIGIT) == 0;
                if (agrees) digit = key >> shift & (BINS - 1);
            }
            // Scores crowd into few bins (a leading digit is a sign and an exponent): lanes of one bin add once.
            unsigned equal = __match_any_sync(ALL_LANES, digit);
            if (digit != NO_BIN && lane + 1 == static_cast<unsigned>(__ffs(equal)))
                atomicAdd(&histogram[digit], __popc(equal));
        }
        __syncthreads();
        if (warp == 0) find_bin(histogram, left, &bin, &above_bin);
        __syncthreads();
        threshold |= bin << shift;
        left -= above_bin;
    }

    // Each warp has its own stretch of tokens. It first counts, then knows where its tokens go: after all of the
    // stretches before it.
    const unsigned stretch = (tokens + THREADS - 1) / THREADS * WARP, begin = warp * stretch;
    const unsigned end = begin + stretch < tokens ? begin + stretch : tokens;
    unsigned above = 0, ties = 0;
    for (unsigned first = begin; first < end; first += WARP) {
        unsigned key = first + lane < end ? ordered(score[first + lane]) : 0;
        above += __popc(__ballot_sync(ALL_LANES, key > threshold));
        ties += __popc(__ballot_sync(ALL_LANES, key == threshold));
    }
    if (lane == 0) above_in[warp] = above, ties_in[warp] = ties;
    __syncthreads();
    above = ties = 0;
    for (unsigned w = 0; w < warp; ++w) above += above_in[w], ties += ties_in[w];

    const unsigned lanes_before = (1u << lane) - 1;
    for (unsigned first = begin; first < end; first += WARP) {
        unsigned i = first + lane, key = i < end ? ordered(score[i]) : 0;
        bool is_above = key > threshold, is_tie = key == threshold;
        unsigned above_mask = __ballot_sync(ALL_LANES, is_above), tie_mask = __ballot_sync(ALL_LANES, is_tie);
        unsigned tie = ties + __popc(tie_mask & lanes_before);  // its rank among the ties, of which `left` are kept
        unsigned ties_kept = tie < left ? tie : left;
        if (is_above || (is_tie && tie - TIE_SHIFT < left))
            index[above + __popc(above_mask & lanes_before) + ties_kept] = i;
        above += __popc(above_mask);
        ties += __popc(tie_mask);
    }
}

// The tensors to copy rows of, and how many bytes of each a thread copies at a time.
struct Plan {
    UnicacheRows rows[TENSORS];
    unsigned unit[TENSORS];
};

struct alignas(16) Bytes16 {
    uint64_t half[2];
};

template <class Unit>
__device__ void copy_rows(const UnicacheRows& rows, const int64_t* index, unsigned tokens, unsigned k) {
    const int64_t head = blockIdx.y, width = rows.bytes / sizeof(Unit), count = width * k;
    const Unit* source = static_cast<const Unit*>(rows.source) + head * tokens * width;
    Unit* target = static_cast<Unit*>(rows.target) + head * count;
    // Neighbouring threads write neighbouring units, across rows too: short rows (a position, a bias) coalesce as well.
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        unsigned row = static_cast<unsigned>(i) / static_cast<unsigned>(width);  // the launcher checks that both fit
        target[i] = source[index[row] * width + (i - row * width)];
    }
}

// Grid: parts of a head's rows, heads, tensors.
__global__ void __launch_bounds__(GATHER_THREADS)
gather_rows(const __grid_constant__ Plan plan, const int64_t* __restrict__ index, unsigned tokens, unsigned k) {
    const UnicacheRows& rows = plan.rows[blockIdx.z];
    index += static_cast<int64_t>(blockIdx.y) * k;
    switch (plan.unit[blockIdx.z]) {
        case 16: return copy_rows<Bytes16>(rows, index, tokens, k);
        case 8: return copy_rows<uint64_t>(rows, index, tokens, k);
        case 4: return copy_rows<uint32_t>(rows, index, tokens, k);
        case 2: return copy_rows<uint16_t>(rows, index, tokens, k);
        default: return copy_rows<uint8_t>(rows, index, tokens, k);
    }
}

// The widest unit, of at most 16 bytes, that rows of a tensor are made of and that its addresses allow.
unsigned unit_of(const UnicacheRows& rows) {
    uint64_t bits = reinterpret_cast<uintptr_t>(rows.source) | reinterpret_cast<uintptr_t>(rows.target) | rows.bytes | 16;
    return static_cast<unsigned>(bits & (~bits + 1));
}

}  // namespace

// rows: key, value, positions and bias, contiguous on the device. heads: batch * kv_heads. index: [heads, k].
// Returns a cudaError_t: 0 where the work is on the stream, 1 (invalid value) where the sizes are out of range.
extern "C" int unicache_topk_gather(
    const float* score, const UnicacheRows* rows, int64_t* index, int heads, int tokens, int k, cudaStream_t stream) {
    constexpr int INVALID_VALUE = 1;
    constexpr unsigned MOST_PARTS = 64;
    if (heads < 0 || heads > UNICACHE_MOST_HEADS || k < 0 || k > tokens) return INVALID_VALUE;
    Plan plan{};
    int64_t most = 1;
    for (unsigned t = 0; t < TENSORS; ++t) {
        plan.rows[t] = rows[t];
        plan.unit[t] = unit_of(rows[t]);
        if (rows[t].bytes < 0 || rows[t].bytes > UINT32_MAX) return INVALID_VALUE;
        int64_t units = rows[t].bytes / plan.unit[t] * k;
        if (units > UINT32_MAX) return INVALID_VALUE;
        most = units > most ? units : most;
    }
    if (heads == 0 || k == 0) return 0;
    SIMT_LAUNCH(select_best, dim3(heads), dim3(THREADS), stream, score, tokens, k, index);
    if (int error = last_error()) return error;
    int64_t parts = (most + GATHER_THREADS - 1) / GATHER_THREADS;
    dim3 grid(parts < MOST_PARTS ? static_cast<unsigned>(parts) : MOST_PARTS, heads, TENSORS);
    SIMT_LAUNCH(gather_rows, grid, dim3(GATHER_THREADS), stream, plan, index, tokens, k);
    return last_error();
}
