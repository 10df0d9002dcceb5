// One kernel's call as a value, and the kernels as parts of a parallel region: every thread of the region calls them with the same
// job, and none returns before all have done theirs.
#pragma once

#include <atomic>
#include <cstdint>

#include "sharing.h"

namespace tessera {

// ``KINDS`` of serve/model/recording.py.
enum Kind : int64_t { kProduct, kQuantized, kRounded, kAttention, kAdd, kMultiply, kLayerNorm, kRmsNorm, kLookUp, kWiden, kSum };

// ``PlainRows`` of serve/model/linear.py: where the rows of a weight lie until they are packed, ``stride`` numbers apart, or its
// columns if it is stored transposed. A product reads them there as long as there is a place. Whoever packs them takes it away
// afterwards, while others compute.
struct PlainRows {
    std::atomic<const char*> place;
    int64_t stride;
    int64_t is_transposed;
};

// ``Job`` of serve/model/recording.py. What a field means beyond its name: where the kind's own function is.
struct Job {
    int64_t kind, is_bf16;
    const void* x;       // [rows, width or inputs], rows ``x_stride`` numbers apart; of a sum over ranks their group
    const void* y;       // the other summand or factor, ``y_stride`` apart; of attention its ``Step``, of a look-up int64 [rows], of a
                         // sum over ranks how many were begun, int64, which another thread reads
    const void* weight;  // packed for products, of a norm [width], of a look-up the table
    const void* scales;  // of quantized weights
    const void* bias;
    void* out;           // rows ``out_stride`` apart
    int64_t rows, width, inputs, x_stride, y_stride, out_stride;
    int64_t activation;  // of a product; of an RMSNorm how it is rounded
    int64_t bits, group; // of quantized weights; of a product 12 bits if its weight is compressed, else 0
    double epsilon;
    const PlainRows* plain;  // of a product whose weight may not be packed yet, or none
    const int32_t* panels;   // of a product: of which 32 outputs each is computed, and no other; none: all are
    int64_t num_panels;
};

void multiply(const Job& job, Hand& hand);            // linear.cpp
void multiply_quantized(const Job& job, Hand& hand);  // quantized.cpp
void multiply_rounded(const Job& job, Hand& hand);    // rounded.cpp
void add_ranks(const Job& job);                       // group.cpp
void attend(const Job& job);                          // attention.cpp
void attend_fp32(const Job& job);                     // attention_fp32.cpp
void attend_bf16(const Job& job);                     // attention_bf16.cpp
void attend_int8(const Job& job);                     // attention_int8.cpp

}  // namespace tessera
