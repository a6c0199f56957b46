// Vectors of AVX-512 (F, BW, DQ and VL), for the two paths that use it.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "attention.h"

namespace {

constexpr int LANES = 16, ROWS = 4, DIRECT = 4, KEPT = 16;
typedef float Vec __attribute__((vector_size(64)));  // not __m512, arrays of which GCC keeps in memory

INLINE Vec load(const float* from) { return _mm512_loadu_ps(from); }
INLINE void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
INLINE Vec fill(float x) { return _mm512_set1_ps(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Vec scale(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
INLINE float top(Vec x) { return _mm512_reduce_max_ps(x); }

// Of every quarter of a, b, c and d one sum: quarter q of the result holds those of quarter q.
INLINE Vec of_quarters(Vec a, Vec b, Vec c, Vec d) {
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    return _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
}
// Quarters of a and b, neighbours added.
INLINE Vec pairs(Vec a, Vec b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); }
template <int N>
INLINE void store_quarters(Vec x, float* out, int64_t stride) {
    _mm_storeu_ps(out, _mm512_castps512_ps128(x));
    if (N > 1) _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(x, 1));
    if (N > 2) _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(x, 2));
    if (N > 3) _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(x, 3));
}
template <int N>
INLINE void sums(const Vec (&x)[N][4], float* out, int64_t stride) {
    Vec quarters[4] = {};
    for (int n = 0; n < N; n++) quarters[n] = of_quarters(x[n][0], x[n][1], x[n][2], x[n][3]);
    store_quarters<N>(pairs(pairs(quarters[0], quarters[1]), pairs(quarters[2], quarters[3])), out, stride);
}

INLINE __m512i widened(const int8_t* from) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
INLINE Vec codes8(const int8_t* from) { return _mm512_cvtepi32_ps(widened(from)); }
INLINE void codes4(const int8_t* from, Vec& low, Vec& high) {
    const Vec of_low = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i bytes = widened(from);
    low = _mm512_permutexvar_ps(bytes, of_low);  // by the low four bits
    high = _mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 4));
}
INLINE Vec halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
INLINE void to_halves(uint16_t* to, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
