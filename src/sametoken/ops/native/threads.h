/* The team of threads: torch's own OpenMP runtime, or a team of one. */
#ifndef SAMETOKEN_THREADS_H
#define SAMETOKEN_THREADS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_max_threads(void) { return 1; }
#endif

/* Below this number of elements one thread is faster. */
#define PARALLEL_ELEMENTS 16384

typedef struct {
    int64_t first, last;
} range;

/* This thread's contiguous share of `count` items. */
static inline range own_part(int64_t count) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return (range){count * thread / threads, count * (thread + 1) / threads};
}

typedef struct {
    char *memory;
    size_t size;
} buffer;

/* Thread-local memory that grows on demand; NULL if allocation fails. */
static inline void *reserve(buffer *own, size_t bytes) {
    if (own->size < bytes) {
        free(own->memory);
        own->size = (bytes + 4095) / 4096 * 4096;
        own->memory = aligned_alloc(64, own->size);
        if (!own->memory) own->size = 0;
    }
    return own->memory;
}

#endif
