/* The team of threads: torch's own OpenMP runtime, or a team of one. */
#ifndef SAMETOKEN_THREADS_H
#define SAMETOKEN_THREADS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef _OPENMP
/* Of every runtime; Apple's compiler, and some of clang's packages, come without omp.h. */
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);
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

/* Thread-local memory, all 0 at first; it is freed when its thread ends (threads.c). */
typedef struct buffer {
    char *memory;
    size_t size;
    struct buffer *next; /* of the same thread */
    int noted;
} buffer;

void *grow(buffer *own, size_t bytes);

/* At least `bytes`, which may be 0; NULL if allocation fails. */
static inline void *reserve(buffer *own, size_t bytes) {
    return own->memory && own->size >= bytes ? own->memory : grow(own, bytes);
}

#endif
