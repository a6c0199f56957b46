// The path for any processor: vectors of four floats as the compiler makes them.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention.h"

namespace {

constexpr int LANES = 4, ROWS = 2, DIRECT = 2, KEPT = 8;
typedef float Vec __attribute__((vector_size(16)));

INLINE Vec load(const float* from) {
    Vec x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE void store(float* to, Vec x) { memcpy(to, &x, sizeof x); }
INLINE Vec fill(float x) { return Vec{x, x, x, x}; }
INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
INLINE Vec maximum(Vec a, Vec b) {
    for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
INLINE Vec nearest(Vec x) {
    const Vec shift = fill(12582912);  // 1.5 * 2^23, where floats are whole numbers
    return x + shift - shift;
}
INLINE Vec scale(Vec x, Vec n) {
    for (int i = 0; i < LANES; i++) {
        const int32_t bits = (n[i] > -127 ? static_cast<int32_t>(n[i]) + 127 : 0) << 23;  // no whole number is NaN
        float power;
        memcpy(&power, &bits, sizeof power);
        x[i] *= power;
    }
    return x;
}
INLINE float top(Vec x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
template <int N>
INLINE void sums(const Vec (&x)[N][4], float* out, int64_t stride) {
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 4; i++) out[n * stride + i] = (x[n][i][0] + x[n][i][1]) + (x[n][i][2] + x[n][i][3]);
}
INLINE Vec of(int a, int b, int c, int d) {
    return Vec{static_cast<float>(a), static_cast<float>(b), static_cast<float>(c), static_cast<float>(d)};
}
INLINE Vec codes8(const int8_t* from) { return of(from[0], from[1], from[2], from[3]); }
INLINE void codes4(const int8_t* from, Vec& low, Vec& high) {
    low = of(from[0] & 15, from[1] & 15, from[2] & 15, from[3] & 15) - fill(8);
    high = of(from[0] >> 4, from[1] >> 4, from[2] >> 4, from[3] >> 4);
}

float float_of(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) return (sign ? -1 : 1) * ldexpf(mantissa, -24);
    const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
// To the nearest, ties to even.
uint16_t half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;                                              // not a number
    if (size >= 0x477ff000) return sign | 0x7c00;                                             // infinite, or becomes so
    if (size < 0x38800000) return sign | static_cast<uint16_t>(rintf(ldexpf(fabsf(x), 24)));  // below the normal ones
    return sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}
INLINE Vec halves(const uint16_t* from) {
    return Vec{float_of(from[0]), float_of(from[1]), float_of(from[2]), float_of(from[3])};
}
INLINE void to_halves(uint16_t* to, Vec x) {
    for (int i = 0; i < LANES; i++) to[i] = half_of(x[i]);
}

}  // namespace

#include "attention_path.h"
#include "row_matmul_path.h"

const unicache::Path unicache::plain = {attend<Queries>, finish, multiply};
