// Attention of bf16 queries to a cache of bf16.
#include "attention.h"

void tessera::attend_bf16(const Job& job) {
    const Step& step = *static_cast<const Step*>(job.y);
#ifdef TESSERA_PAIRS
    if (step.block_tokens == kPart && step.head_dim % kPart == 0) return attend_all<Pairs, bf16>(step);
#endif
    attend_all<Single<bf16>, bf16>(step);
}
