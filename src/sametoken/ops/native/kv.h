/* Keys and values in memory: in the dtype of activations, or as e4m3. */
#ifndef SAMETOKEN_KV_H
#define SAMETOKEN_KV_H

#include "e4m3.h"

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

/* As store_some; as e4m3, divided by its scale. */
INLINE void store_kv(void *base, int64_t index, int64_t count, int bf16, int64_t e4m3,
                     float scale, f32v v) {
    if (e4m3) store_e4m3(base, index, count, v / scale);
    else store_some(base, index, count, bf16, v);
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
