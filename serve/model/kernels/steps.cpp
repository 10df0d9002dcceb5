// A list of kernels' calls, walked inside one parallel region; and what stands between products and attention in a model's layers:
// sums, factors, norms, rows of a table.
//
// Shapes.  R rows   W numbers of a row
#include <sys/socket.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parts.h"
#include "vectors.h"

namespace {

using tessera::Job;

// How an RMSNorm (Zhang and Sennrich 2019) is rounded and weighed: ``ROUNDINGS`` of serve/model/norms.py.
enum Rounding { kBeforeWeight, kOnce, kOnePlusWeight };

template <typename scalar>
const scalar* row_of(const void* first, int64_t stride, int64_t row) {
    return static_cast<const scalar*>(first) + row * stride;
}

template <typename scalar>
void add_row(const scalar* x, const scalar* y, scalar* out, int64_t W) {
    for (int64_t i = 0; i < W; ++i) from_float(to_float(x[i]) + to_float(y[i]), out[i]);
}

template <typename scalar>
void multiply_row(const scalar* x, const scalar* y, scalar* out, int64_t W) {
    for (int64_t i = 0; i < W; ++i) from_float(to_float(x[i]) * to_float(y[i]), out[i]);
}

// Statistics of a row in fp32, as wide numbers beside it.
template <typename scalar>
float* widened(const scalar* x, int64_t W) {
    thread_local std::vector<float> wide;
    if (wide.size() < size_t(W)) wide.resize(size_t(W));
    float* out = wide.data();
    for (int64_t i = 0; i < W; ++i) out[i] = to_float(x[i]);
    return out;
}

// Layer norm (Ba et al. 2016); the mean is taken off before squares are summed.
template <typename scalar>
void layer_norm_row(const scalar* x, const scalar* weight, const scalar* bias, scalar* out, int64_t W, float epsilon) {
    float* wide = widened(x, W);
    float total = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < W; ++i) total += wide[i];
    const float mean = total / float(W);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < W; ++i) {
        wide[i] -= mean;
        squares += wide[i] * wide[i];
    }
    const float scale = 1.0f / std::sqrt(squares / float(W) + epsilon);
    if (bias)
        for (int64_t i = 0; i < W; ++i) from_float(wide[i] * scale * to_float(weight[i]) + to_float(bias[i]), out[i]);
    else
        for (int64_t i = 0; i < W; ++i) from_float(wide[i] * scale * to_float(weight[i]), out[i]);
}

template <typename scalar>
void rms_norm_row(const scalar* x, const scalar* weight, scalar* out, int64_t W, float epsilon, Rounding rounding) {
    const float* wide = widened(x, W);
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < W; ++i) squares += wide[i] * wide[i];
    const float scale = 1.0f / std::sqrt(squares / float(W) + epsilon);
    if (rounding == kBeforeWeight)
        for (int64_t i = 0; i < W; ++i) {
            scalar rounded;
            from_float(wide[i] * scale, rounded);
            from_float(to_float(weight[i]) * to_float(rounded), out[i]);
        }
    else if (rounding == kOnce)
        for (int64_t i = 0; i < W; ++i) from_float(to_float(weight[i]) * (wide[i] * scale), out[i]);
    else
        for (int64_t i = 0; i < W; ++i) from_float(wide[i] * scale * (1.0f + to_float(weight[i])), out[i]);
}

template <typename scalar>
void compute_row(const Job& job, int64_t row) {
    const scalar* x = row_of<scalar>(job.x, job.x_stride, row);
    const scalar *weight = static_cast<const scalar*>(job.weight), *bias = static_cast<const scalar*>(job.bias);
    scalar* out = static_cast<scalar*>(job.out) + row * job.out_stride;
    switch (job.kind) {
        case tessera::kAdd: return add_row(x, row_of<scalar>(job.y, job.y_stride, row), out, job.width);
        case tessera::kMultiply: return multiply_row(x, row_of<scalar>(job.y, job.y_stride, row), out, job.width);
        case tessera::kLayerNorm: return layer_norm_row(x, weight, bias, out, job.width, float(job.epsilon));
        case tessera::kRmsNorm: return rms_norm_row(x, weight, out, job.width, float(job.epsilon), Rounding(job.activation));
        case tessera::kLookUp: {
            const int64_t place = static_cast<const int64_t*>(job.y)[row];
            std::memcpy(out, weight + place * job.inputs, size_t(job.width) * sizeof(scalar));
        }
    }
}

inline bool is_by_rows(const Job& job) { return job.kind >= tessera::kAdd && job.kind < tessera::kWiden; }

// Whether a row of a job depends on nothing but the same row of the one before, and lies where no other row of that one does: then
// a thread goes on with its rows without waiting for the others. Memory that one job is through with the next may have, so with
// several rows those of both must be of the same size and none further apart than they are long.
inline bool is_dense(const Job& job) {
    const auto dense = [&](int64_t stride) { return stride == job.width || stride == 0; };
    return dense(job.out_stride) && (job.kind == tessera::kLookUp || dense(job.x_stride)) && dense(job.y_stride);
}
inline bool goes_on(const Job& before, const Job& job) {
    if (!is_by_rows(job) || job.rows != before.rows || job.is_bf16 != before.is_bf16) return false;
    return job.rows == 1 || (job.width == before.width && is_dense(before) && is_dense(job));
}

void compute_rows(const Job* jobs, int64_t count) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < jobs->rows; ++row)
        for (int64_t j = 0; j < count; ++j) (jobs->is_bf16 ? compute_row<bf16> : compute_row<float>)(jobs[j], row);
}

// bf16 numbers as fp32; rows are long here, and few.
void widen_rows(const Job& job) {
    constexpr int64_t kRun = 4096;
    const int64_t runs = (job.width + kRun - 1) / kRun;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < job.rows * runs; ++item) {
        const int64_t row = item / runs, begin = item % runs * kRun, count = job.width - begin < kRun ? job.width - begin : kRun;
        widen(row_of<bf16>(job.x, job.x_stride, row) + begin, static_cast<float*>(job.out) + row * job.out_stride + begin, count);
    }
}

constexpr int64_t kLook = 8;  // jobs after which is looked for a message: about a layer's

// Whether the message that waits at a socket overtakes what is being done: its length's highest bit says so (serve/worker/wire.py).
bool is_overtaken(int socket) {
    unsigned char first = 0;
    return recv(socket, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && (first & 0x80u) != 0;
}

// By all threads of a parallel region. ``overtaken`` is theirs together.
void walk(const Job* jobs, int64_t count, int socket, bool& overtaken, tessera::Hand& hand) {
    for (int64_t at = 0, looked = -kLook; at < count;) {
        if (socket >= 0 && at - looked >= kLook) {
            looked = at;
            // One thread looks for all of them. No other look comes before each has read what this one found: a job lies between.
#pragma omp single
            overtaken = is_overtaken(socket);
            if (overtaken) return;
        }
        const Job& job = jobs[at];
        int64_t next = at + 1;
        switch (job.kind) {
            case tessera::kProduct: tessera::multiply(job, hand); break;
            case tessera::kQuantized: tessera::multiply_quantized(job, hand); break;
            case tessera::kRounded: tessera::multiply_rounded(job, hand); break;
            case tessera::kAttention: tessera::attend(job); break;
            case tessera::kWiden: widen_rows(job); break;
            case tessera::kSum: tessera::add_ranks(job); break;
            default:
                while (next < count && goes_on(jobs[next - 1], jobs[next])) ++next;
                compute_rows(jobs + at, next - at);
        }
        at = next;
    }
}

}  // namespace

extern "C" {

// Jobs one after the other, each when what the ones before have written is there. Where there is a socket, only until a message
// waits there that overtakes them; returns whether none did.
bool tessera_steps(const tessera::Job* jobs, int64_t count, int threads, int socket) {
    bool overtaken = false;
    tessera::Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        tessera::Hand hand(team);
        walk(jobs, count, socket, overtaken, hand);
    }
    return !overtaken;
}
}
