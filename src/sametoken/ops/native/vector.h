/* Sixteen-lane vectors for gcc and clang, and the rounding rules that all kernels share.
 *
 * Every sum below has an order of additions that depends on nothing but its own length:
 * compile with -ffp-contract=off and without -ffast-math, or the row law is lost. */
#ifndef SAMETOKEN_VECTOR_H
#define SAMETOKEN_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

INLINE f32x16 splat(float value) { return value - (f32x16){0}; }

INLINE f32x16 select_lanes(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}

INLINE f32x16 max_lanes(f32x16 a, f32x16 b) { return select_lanes(a > b, a, b); }

/* a * b + c, fused where the CPU can: one rule per build, chosen here alone. */
INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    typedef union {
        f32x16 whole;
        __m256 half[2];
    } halves;
    halves x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#else
    return a * b + c;
#endif
}

/* Lane l of a shuffle takes lane PICK(l, s) of a, or of b where that is 16 or more. */
#define LANE_LIST(PICK, s)                                                             \
    PICK(0, s), PICK(1, s), PICK(2, s), PICK(3, s), PICK(4, s), PICK(5, s), PICK(6, s),    \
        PICK(7, s), PICK(8, s), PICK(9, s), PICK(10, s), PICK(11, s), PICK(12, s),         \
        PICK(13, s), PICK(14, s), PICK(15, s)
#if defined(__clang__)
#define SHUFFLE(a, b, PICK, s) __builtin_shufflevector(a, b, LANE_LIST(PICK, s))
#else
#define SHUFFLE(a, b, PICK, s) __builtin_shuffle(a, b, (u32x16){LANE_LIST(PICK, s)})
#endif

/* Sum of the lanes, by halves. */
INLINE float sum_lanes(f32x16 v) {
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

INLINE float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Round to nearest even bf16; NaN stays NaN. */
INLINE u16x16 narrow(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_nan = (u32x16)(v != v);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), u16x16);
#endif
}

/* Up to 16 elements of a bf16 or fp32 array from `index` on; the other lanes are 0. */
INLINE f32x16 load_some(const void *base, int64_t index, int64_t count, int bf16) {
    if (bf16) {
        u16x16 half = {0};
        const uint16_t *from = (const uint16_t *)base + index;
        if (count >= LANES) memcpy(&half, from, sizeof half);
        else memcpy(&half, from, count * sizeof *from);
        return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
    }
    f32x16 full = {0};
    const float *from = (const float *)base + index;
    if (count >= LANES) memcpy(&full, from, sizeof full);
    else memcpy(&full, from, count * sizeof *from);
    return full;
}

INLINE void store_some(void *base, int64_t index, int64_t count, int bf16, f32x16 v) {
    if (bf16) {
        u16x16 half = narrow(v);
        uint16_t *to = (uint16_t *)base + index;
        if (count >= LANES) memcpy(to, &half, sizeof half);
        else memcpy(to, &half, count * sizeof *to);
    } else {
        float *to = (float *)base + index;
        if (count >= LANES) memcpy(to, &v, sizeof v);
        else memcpy(to, &v, count * sizeof *to);
    }
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
