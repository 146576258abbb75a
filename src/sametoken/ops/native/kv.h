/* Keys and values in memory: in the dtype of activations, or as e4m3. */
#ifndef SAMETOKEN_KV_H
#define SAMETOKEN_KV_H

#include "vector.h"

/* The e4m3 number of each lane's lowest byte. Unlike those of weights (quantized.c) they may be NaN,
 * and often subnormal, so no subnormal fp32 number, which is slow, comes up on the way. */
INLINE f32v e4m3_numbers(u32v codes) {
    u32v size = codes & 0x7f;
    f32v subnormal = __builtin_convertvector((i32v)size, f32v) * 0x1p-9f;
    f32v normal = (f32v)((size << 20) + (120 << 23)); /* the exponent's bias is 7, here 127 */
    f32v number = select_lanes((i32v)size < 8, subnormal, normal);
    number = select_lanes(size == 0x7f, splat(NAN), number);
    return (f32v)((u32v)number | (codes & 0x80) << 24);
}

/* Bytes of numbers rounded to e4m3: to nearest even, at most 448; NaN becomes 0x7f. */
INLINE u32v e4m3_codes(f32v v) {
    u32v sign = (u32v)v >> 24 & 0x80;
    f32v size = (f32v)((u32v)v & 0x7fffffff);
    size = select_lanes(size > 448.0f, splat(448.0f), size);
    u32v bits = (u32v)size;
    u32v normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    f32v magic = splat(0x1.8p14f); /* its ulp is the distance of subnormal numbers, 2^-9 */
    u32v subnormal = (u32v)(size + magic) - (u32v)magic;
    u32v code = (u32v)select_lanes(size < 0x1p-6f, (f32v)subnormal, (f32v)normal);
    return (u32v)select_lanes(v == v, (f32v)(code | sign), (f32v)((u32v){0} + 0x7f));
}

INLINE f32v load_e4m3(const void *base, int64_t index, int64_t count) {
    const uint8_t *from = (const uint8_t *)base + index;
    if (count >= LANES) return e4m3_numbers(load_bytes(from));
    u8v some = {0};
    memcpy(&some, from, count);
    return e4m3_numbers(load_bytes(&some));
}

INLINE void store_e4m3(void *base, int64_t index, int64_t count, f32v v) {
    u8v bytes = __builtin_convertvector(e4m3_codes(v), u8v);
    uint8_t *to = (uint8_t *)base + index;
    if (count >= LANES) memcpy(to, &bytes, sizeof bytes);
    else memcpy(to, &bytes, count);
}

/* As load_some; the format of e4m3 wins over that of activations. */
INLINE f32v load_kv(const void *base, int64_t index, int64_t count, int bf16, int64_t e4m3) {
    return e4m3 ? load_e4m3(base, index, count) : load_some(base, index, count, bf16);
}

/* `count` words of activations, one fp32 or two bf16 elements each, from a key's elements from
 * `index` on; further lanes are 0. Every e4m3 number is one of bf16. */
INLINE u32v kv_words(const void *base, int64_t index, int64_t count, int bf16, int64_t e4m3) {
    if (!e4m3) {
        const char *from = (const char *)base + index * (bf16 ? 2 : 4);
        u32v words, some = {0};
        if (count == LANES) {
            memcpy(&words, from, sizeof words);
            return words;
        }
        memcpy(&some, from, count * 4);
        return some;
    }
    if (!bf16) return (u32v)load_e4m3(base, index, count);
    u16v pairs = {0};
    if (count == LANES) memcpy(&pairs, (const char *)base + index, sizeof pairs);
    else memcpy(&pairs, (const char *)base + index, count * 2);
    u32v codes = widen_words(pairs);
    return (u32v)e4m3_numbers(codes) >> 16 | ((u32v)e4m3_numbers(codes >> 8) & 0xffff0000);
}

INLINE float scale_of(const float *scales, int64_t head) { return scales ? scales[head] : 1.0f; }

#endif
