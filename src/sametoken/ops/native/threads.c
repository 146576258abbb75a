/* Working memory of threads, which ends with them. */
#include "threads.h"

#include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t first_of_thread;
static int has_key;

static void free_all(void *first) {
    for (buffer *one = first, *next; one; one = next) {
        next = one->next;
        free(one->memory);
        *one = (buffer){0};
    }
}

static void make_key(void) { has_key = !pthread_key_create(&first_of_thread, free_all); }

/* Note a buffer to be freed at the end of this thread. */
static void note(buffer *own) {
    pthread_once(&once, make_key);
    if (!has_key) return;
    own->next = pthread_getspecific(first_of_thread);
    own->noted = !pthread_setspecific(first_of_thread, own);
}

void *grow(buffer *own, size_t bytes) {
    if (!own->noted) note(own);
    free(own->memory);
    own->size = (bytes / 4096 + 1) * 4096;
    own->memory = aligned_alloc(64, own->size);
    if (!own->memory) own->size = 0;
    return own->memory;
}
