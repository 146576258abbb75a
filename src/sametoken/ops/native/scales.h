/* Scales of quantized weights, and other numbers by group that have their dtype. */
#ifndef SAMETOKEN_SCALES_H
#define SAMETOKEN_SCALES_H

#include "e4m3.h"

enum { FP32, FP16, BF16, E4M3 };

INLINE int64_t scale_bytes(int64_t kind) { return kind == FP32 ? 4 : kind == E4M3 ? 1 : 2; }

/* LANES neighbouring numbers; those of e4m3 are not NaN. */
INLINE f32v scale_lanes(const char *from, int64_t kind) {
    if (kind == E4M3) return e4m3_finite(load_bytes(from) << 24);
    if (kind != FP16) return load_some(from, 0, LANES, kind == BF16);
    u16v half;
    memcpy(&half, from, sizeof half);
    u32v word = widen_words(half);
    f32v size = (f32v)((word & 0x7fff) << 13) * 0x1p112f; /* exact, subnormal numbers too */
    return (f32v)((u32v)size | (word & 0x8000) << 16);
}

#endif
