// Paged attention on the CPU, as it is called: by the types of the queries and of the cache. What is done is in attention.h; each
// type has a file of its own, since they take long to compile.
#include "attention.h"

void tessera::attend(const Job& job) {
    const bool is_whole = static_cast<const Step*>(job.y)->key_scales != nullptr;
    (is_whole ? attend_int8 : job.is_bf16 ? attend_bf16 : attend_fp32)(job);
}

extern "C" {

int tessera_kernel_version() { return 20; }
int tessera_max_rows() { return kMaxRows; }

void tessera_attend(int is_bf16, int threads, const Step* step) {
    tessera::Job job = {};
    job.is_bf16 = is_bf16, job.y = step;
#pragma omp parallel num_threads(threads)
    tessera::attend(job);
}
}
