// Attention of fp32 or bf16 queries to a cache of whole numbers.
#include "attention.h"

void tessera::attend_int8(const Job& job) {
    const Step& step = *static_cast<const Step*>(job.y);
    (job.is_bf16 ? attend_all<Single<int8_t>, bf16> : attend_all<Single<int8_t>, float>)(step);
}
