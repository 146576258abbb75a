/* The phases of a recurrent rule over slots, in batches of bounded memory. A file includes this
 * after its `rule_job`, `prepared_width`, `prepare`, `advance`, and `units_of`. */

/* Floats of prepared rows held at once; more slots run in several batches. */
#define PREPARED_FLOATS (4 << 20)

static _Thread_local buffer prepared_memory, thread_memory;

/* Number of slots in a batch: as many as PREPARED_FLOATS allows, at least one. */
INLINE int64_t batch_of(const slot_part *parts, int64_t count, int64_t width) {
    int64_t slots = 1, most = PREPARED_FLOATS / width;
    while (slots < count &&
           parts[slots].rows_before + total_rows(parts + slots) - parts->rows_before <= most)
        slots++;
    return slots;
}

/* Rows of a batch. */
INLINE int64_t rows_of(const slot_part *parts, int64_t count) {
    const slot_part *last = parts + count - 1;
    return last->rows_before + total_rows(last) - parts->rows_before;
}

/* All phases for `count` slots; returns 0, before any write, if out of memory. */
INLINE int64_t run_slots(const rule_job *job, const slot_part *parts, int64_t count,
                         const int bf16) {
    rule_units units = units_of(job);
    int64_t rows = rows_of(parts, count), width = prepared_width(job);
    int failed = 0;
#pragma omp parallel if (rows * units.advanced * units.elements > PARALLEL_ELEMENTS)
    {
        void *own = reserve(&thread_memory, units.elements * sizeof(float));
        if (!own) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < (failed ? 0 : count * units.prepared); unit++) {
            const slot_part *part = parts + unit / units.prepared;
            float *prepared = job->prepared + (part->rows_before - parts->rows_before) * width;
            prepare(job, part, unit % units.prepared, prepared, bf16);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < (failed ? 0 : count * units.advanced); unit++) {
            const slot_part *part = parts + unit / units.advanced;
            float *prepared = job->prepared + (part->rows_before - parts->rows_before) * width;
            advance(job, part, unit % units.advanced, own, prepared, bf16);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (failed ? 0 : count); i++) keep(&job->raw, parts + i, bf16);
    }
    return !failed;
}

/* All slots; returns 0 if out of memory. */
INLINE int64_t run_batches(rule_job *job, const slot_part *parts, int64_t count, int64_t bf16) {
    for (int64_t slots; count > 0; parts += slots, count -= slots) {
        slots = batch_of(parts, count, prepared_width(job));
        int64_t floats = rows_of(parts, slots) * prepared_width(job);
        job->prepared = reserve(&prepared_memory, floats * sizeof(float));
        if (!job->prepared) return 0;
        if (!(bf16 ? run_slots(job, parts, slots, 1) : run_slots(job, parts, slots, 0))) return 0;
    }
    return 1;
}
