// The path for 64-bit Arm.
#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "attention.h"

namespace {

constexpr int LANES = 4, ROWS = 4, DIRECT = 4, KEPT = 16;
typedef float32x4_t Vec;

INLINE Vec load(const float* from) { return vld1q_f32(from); }
INLINE void store(float* to, Vec x) { vst1q_f32(to, x); }
INLINE Vec fill(float x) { return vdupq_n_f32(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
INLINE Vec maximum(Vec a, Vec b) { return vmaxq_f32(a, b); }
INLINE Vec nearest(Vec x) { return vrndnq_f32(x); }
INLINE Vec scale(Vec x, Vec n) {
    const int32x4_t power = vmaxq_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), vdupq_n_s32(0));
    return x * vreinterpretq_f32_s32(vshlq_n_s32(power, 23));
}
INLINE float top(Vec x) { return vmaxvq_f32(x); }
template <int N>
INLINE void sums(const Vec (&x)[N][4], float* out, int64_t stride) {
    for (int n = 0; n < N; n++)
        vst1q_f32(out + n * stride, vpaddq_f32(vpaddq_f32(x[n][0], x[n][1]), vpaddq_f32(x[n][2], x[n][3])));
}
INLINE int32x4_t widened(const int8_t* from) {
    uint32_t four;
    memcpy(&four, from, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
INLINE Vec codes8(const int8_t* from) { return vcvtq_f32_s32(widened(from)); }
INLINE void codes4(const int8_t* from, Vec& low, Vec& high) {
    const int32x4_t bytes = widened(from);
    low = vcvtq_f32_s32(vsubq_s32(vandq_s32(bytes, vdupq_n_s32(15)), vdupq_n_s32(8)));
    high = vcvtq_f32_s32(vshrq_n_s32(bytes, 4));
}
INLINE Vec halves(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
INLINE void to_halves(uint16_t* to, Vec x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

}  // namespace

#include "attention_path.h"
#include "row_matmul_path.h"

const unicache::Path unicache::neon = {attend<Queries>, finish, multiply};
#endif
