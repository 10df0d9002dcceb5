// Attention of fp32 queries to a cache of fp32.
#include "attention.h"

void tessera::attend_fp32(const Job& job) { attend_all<Single<float>, float>(*static_cast<const Step*>(job.y)); }
