// What a lane of QuantKVAttention's kernel holds of a token's row: 16 channels, loaded in their packed form and turned
// into floats in registers; and the scales of codes.
#pragma once
#include "kernels.h"
#include "simt.h"

namespace {

constexpr unsigned CHANNELS = 16;  // of a lane

// Floats of either type in memory.
struct Numbers {
    const void* at;
    bool half;

    // As it lies in memory. Loads go first and conversions, which wait for them, after all of them.
    __device__ unsigned bits(unsigned i) const {
        const char* from = static_cast<const char*>(at) + (static_cast<size_t>(i) << (half ? 1 : 2));
        if (half) return __ldg(reinterpret_cast<const unsigned short*>(from));
        return __ldg(reinterpret_cast<const unsigned*>(from));
    }
    __device__ float number(unsigned bits) const {
        return half ? half_to_float(static_cast<unsigned short>(bits)) : __uint_as_float(bits);
    }
    __device__ float operator[](unsigned i) const { return number(bits(i)); }
    __device__ Numbers from(int64_t i) const { return {static_cast<const char*>(at) + i * (half ? 2 : 4), half}; }
    __device__ void set(int64_t i, float x) const {
        if (half) static_cast<unsigned short*>(const_cast<void*>(at))[i] = float_to_half(x);
        else static_cast<float*>(const_cast<void*>(at))[i] = x;
    }
};

// The channel of number `i` of a lane's 16, where lane `chunk` has that chunk of the row; `head_dim` where it has none.
// A byte of two 4-bit codes holds channels j and j + bytes of the row: so does the lane.
__device__ __forceinline__ unsigned channel_of(unsigned bits, unsigned chunk, unsigned i, unsigned head_dim) {
    if (bits != 4) {
        const unsigned channel = chunk * CHANNELS + i;
        return channel < head_dim ? channel : head_dim;
    }
    const unsigned bytes = (head_dim + 1) / 2, byte = chunk * (CHANNELS / 2) + i % (CHANNELS / 2);
    const unsigned channel = byte + (i < CHANNELS / 2 ? 0 : bytes);
    return byte < bytes && channel < head_dim ? channel : head_dim;
}

// A chunk of 16 numbers, of codes (8 or 4 bits), float16 or float32. Loads are of 16 bytes; of 4-bit codes they are of
// 8: 16 bytes are 32 channels, whose queries and sums, for four rows, do not fit into registers, and to hand halves
// round by shuffles costs more instructions than a second load. Either way a warp reads whole lines, one after another.
template <unsigned BITS>
struct Chunk {
    static constexpr unsigned WORDS = CHANNELS * BITS / 32, BYTES = 4 * WORDS;
    unsigned word[WORDS];

    // WIDE: rows are whole chunks, and aligned. Otherwise number by number (of 4-bit codes two by two): right for any
    // head_dim and address, and slow.
    template <bool WIDE>
    __device__ __forceinline__ void load(const uint8_t* row, unsigned row_bytes, unsigned chunk) {
        const unsigned first = chunk * BYTES;
        if constexpr (!WIDE) {
            constexpr unsigned EACH = BITS < 8 ? 1 : BITS / 8;
            SIMT_FOR(w, WORDS) word[w] = 0;
            SIMT_FOR(i, BYTES / EACH) {
                const unsigned b = i * EACH;
                if (first + b >= row_bytes) continue;
                const uint8_t* from = row + first + b;
                unsigned x;
                if constexpr (EACH == 1) x = __ldg(from);
                else if constexpr (EACH == 2) x = __ldg(reinterpret_cast<const unsigned short*>(from));
                else x = __ldg(reinterpret_cast<const unsigned*>(from));
                word[b / 4] |= x << 8 * (b % 4);
            }
        } else if constexpr (BITS == 4) {
            const uint2 x = __ldg(reinterpret_cast<const uint2*>(row + first));
            word[0] = x.x, word[1] = x.y;
        } else {
            SIMT_FOR(i, WORDS / 4) {
                const uint4 x = __ldg(reinterpret_cast<const uint4*>(row + first) + i);
                word[4 * i] = x.x, word[4 * i + 1] = x.y, word[4 * i + 2] = x.z, word[4 * i + 3] = x.w;
            }
        }
    }

    __device__ __forceinline__ void numbers(float (&x)[CHANNELS]) const {
        SIMT_FOR(i, CHANNELS) {
            if constexpr (BITS == 32) x[i] = __uint_as_float(word[i]);
            else if constexpr (BITS == 16) x[i] = half_to_float(word[i / 2] >> 16 * (i % 2) & 0xffff);
            else if constexpr (BITS == 8) x[i] = code(word[i / 4] ^ 0x80808080u, i % 4, 128);
            else {
                const unsigned both = word[i / 4 % 2] ^ 0x80808080u, half = i < CHANNELS / 2 ? both : both >> 4;
                x[i] = code(half & 0x0f0f0f0fu, i % 4, 8);
            }
        }
    }

private:
    // Byte `b` less `zero`, as a float: as the last bits of 2^23 it counts in ones. Faster than to convert integers.
    static __device__ __forceinline__ float code(unsigned bytes, unsigned b, float zero) {
        return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440u + b)) - (8388608.f + zero);
    }
};

// x / by without a division, for x and by up to 2^20.
struct Divisor {
    uint64_t by, reciprocal;

    static Divisor of(int64_t by) { return {static_cast<uint64_t>(by), ((1ull << 40) + by - 1) / by}; }
    __device__ unsigned operator()(unsigned x) const { return static_cast<unsigned>(x * reciprocal >> 40); }
};

// The scales of keys or values. Those of one block of tokens (static, per channel) are a factor of the queries, or of
// the output; those of one block of channels (per token) a factor of the logit, or of the weight.
struct Scales {
    Numbers number;
    bool shared;  // by the batch
    unsigned heads, token_blocks, channel_blocks;
    Divisor tokens, channels;  // that share a scale
    bool halves;               // channels 0..7 of a lane have one scale, and channels 8..15: two weights

    __device__ __host__ bool folded() const { return token_blocks == 1; }
    __device__ bool per_token() const { return token_blocks > 1 && channel_blocks == 1; }
    __device__ unsigned index(unsigned block, unsigned channel) const {
        return block * channel_blocks + channels(channel);
    }
    __device__ Numbers of(unsigned head) const {
        return number.from(static_cast<int64_t>(shared ? head % heads : head) * token_blocks * channel_blocks);
    }
};

}  // namespace
