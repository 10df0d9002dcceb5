// The likeliest token of each of few rows, without most of the head: a narrower copy of its weights gives each logit to within a
// bound, and only those that may be the largest are computed by the head itself.
//
// Shapes.  R rows   I input features   O output features, in panels of 32   S stretches of outputs
//
// The narrower product differs from the exact one by (w - n) x + n (x - z), where n is the narrower weight and z the input as the
// narrower product takes it; by Cauchy and Schwarz that is at most |w - n| |x| + |n| |x - z|. What both lose in sums is in proportion
// to |w| |x|, and is put to the first of the two; what is lost when a product or a logit is stored, to that number itself.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parts.h"
#include "vectors.h"

namespace tessera {

// ``Search`` of serve/model/narrow_head.py.
struct Search {
    Job narrow, exact;           // both write to [R, O]; the narrow one's inputs are copied to where it reads them, if types differ
    const float* losses;         // [O]: |w - n|, and what sums lose for each |x|
    const float* norms;          // [O]: |n|
    const float* biases;         // [O], or none: the narrow product has none
    double rounding;             // what is lost at most when a number is stored, for each of its size
    int64_t most_panels;         // beyond which the search is given up
    int32_t* panels;             // room for all there are
    float* peaks;                // [R]: each row's largest logit
    int64_t* places;             // [R]: the first that has it
};

}  // namespace tessera

namespace {

using tessera::Search;

constexpr int64_t kPanel = 32;
constexpr int64_t kStretch = 128 * kPanel;
constexpr float kLeast = 1e-30f;  // more than all that is lost where numbers become denormal

struct Row {
    float size, moved;  // |x|, |x - z|
};

template <typename scalar>
Row measure(const scalar* x, int64_t I, bf16* copy) {
    double size = 0.0, moved = 0.0;
    for (int64_t i = 0; i < I; ++i) {
        const float exact = to_float(x[i]);
        size += double(exact) * exact;
        if (copy) {
            from_float(exact, copy[i]);
            const bool is_denormal = (copy[i].bits & 0x7f80u) == 0;  // or zero: products of pairs take it for that
            const double by = double(exact) - (is_denormal ? 0.0f : to_float(copy[i]));
            moved += by * by;
        }
    }
    return {float(std::sqrt(size)), float(std::sqrt(moved))};
}

// What bounds the logits of one row.
struct Bounds {
    const float* losses;
    const float* norms;
    const float* biases;
    float size, moved, rounding;
    float logit_of(int64_t o, float product) const { return biases ? product + biases[o] : product; }
    float of(int64_t o, float product, float logit) const {
        const float stored = std::fabs(product) + std::fabs(logit);
        return 1.01f * (losses[o] * size + norms[o] * moved + rounding * stored) + kLeast;  // it is itself rounded
    }
};

// The largest number that some exact logit of a stretch is not below; NaN where a logit or its bound is not finite.
template <typename scalar>
float floor_of(const scalar* products, const Bounds& bounds, int64_t begin, int64_t end) {
    float most = -std::numeric_limits<float>::infinity(), nothing = 0.0f;
#pragma omp simd reduction(max : most) reduction(+ : nothing)
    for (int64_t o = begin; o < end; ++o) {
        const float product = to_float(products[o]), logit = bounds.logit_of(o, product), least = logit - bounds.of(o, product, logit);
        most = least > most ? least : most;
        nothing += least * 0.0f;
    }
    return most + nothing;
}

template <typename scalar>
bool reaches(const scalar* products, const Bounds& bounds, int64_t begin, int64_t end, float floor) {
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t o = begin; o < end; ++o) {
        const float product = to_float(products[o]), logit = bounds.logit_of(o, product);
        found |= int(logit + bounds.of(o, product, logit) >= floor);
    }
    return found != 0;
}

// Of panels that are there, in ascending order.
template <typename scalar>
void peak_of_panels(const scalar* logits, int64_t O, const int32_t* panels, int64_t count, float& peak, int64_t& place) {
    peak = -std::numeric_limits<float>::infinity(), place = 0;
    bool nan = false;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = panels[i] * kPanel, end = begin + kPanel < O ? begin + kPanel : O;
        for (int64_t o = begin; o < end; ++o) {
            const float logit = to_float(logits[o]);
            nan |= logit != logit;
            if (logit > peak) peak = logit, place = o;
        }
    }
    if (nan) peak = std::numeric_limits<float>::quiet_NaN();
}

template <typename Use>
void with_numbers(const tessera::Job& job, int64_t row, const Use& use) {
    if (job.is_bf16)
        use(static_cast<const bf16*>(job.out) + row * job.width);
    else
        use(static_cast<const float*>(job.out) + row * job.width);
}

}  // namespace

extern "C" {

// How many panels were computed, or -1 where the search was given up: too many logits may be the largest, or one is not finite.
int64_t tessera_likeliest(const Search* search, int threads) {
    const tessera::Job& narrow = search->narrow;
    tessera::Job exact = search->exact;
    const int64_t R = exact.rows, O = exact.width, I = exact.inputs, S = (O + kStretch - 1) / kStretch;
    std::vector<Row> rows{size_t(R)};
    std::vector<float> floors(size_t(R * S));
    std::vector<uint8_t> wanted(size_t((O + kPanel - 1) / kPanel));
    bool given_up = false;
    const auto bounds_of = [&](int64_t r) {
        return Bounds{search->losses, search->norms, search->biases, rows[size_t(r)].size, rows[size_t(r)].moved, float(search->rounding)};
    };
    const auto end_of = [&](int64_t begin) { return begin + kStretch < O ? begin + kStretch : O; };
    tessera::Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        tessera::Hand hand(team);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < R; ++r) {
            if (exact.is_bf16) {
                rows[size_t(r)] = measure(static_cast<const bf16*>(exact.x) + r * exact.x_stride, I, nullptr);
            } else {
                bf16* copy = narrow.is_bf16 ? static_cast<bf16*>(const_cast<void*>(narrow.x)) + r * narrow.x_stride : nullptr;
                rows[size_t(r)] = measure(static_cast<const float*>(exact.x) + r * exact.x_stride, I, copy);
            }
        }
        if (narrow.kind == tessera::kQuantized)
            tessera::multiply_quantized(narrow, hand);
        else
            tessera::multiply(narrow, hand);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < R * S; ++item) {
            const int64_t r = item / S, begin = item % S * kStretch;
            with_numbers(narrow, r, [&](auto logits) { floors[size_t(item)] = floor_of(logits, bounds_of(r), begin, end_of(begin)); });
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < R * S; ++item) {
            const int64_t r = item / S, begin = item % S * kStretch, end = end_of(begin);
            float floor = floors[size_t(r * S)];
            for (int64_t s = 1; s < S; ++s) {
                const float other = floors[size_t(r * S + s)];
                floor = other > floor || other != other ? other : floor;
            }
            if (floor != floor) {
                __atomic_store_n(&given_up, true, __ATOMIC_RELAXED);
                continue;
            }
            const Bounds bounds = bounds_of(r);
            with_numbers(narrow, r, [&](auto logits) {
                for (int64_t first = begin; first < end; first += kPanel) {
                    uint8_t* flag = &wanted[size_t(first / kPanel)];
                    if (!__atomic_load_n(flag, __ATOMIC_RELAXED) &&
                        reaches(logits, bounds, first, first + kPanel < end ? first + kPanel : end, floor))
                        __atomic_store_n(flag, uint8_t(1), __ATOMIC_RELAXED);
                }
            });
        }
#pragma omp single
        {
            for (size_t p = 0; p < wanted.size() && !given_up; ++p)
                if (wanted[p]) {
                    given_up = exact.num_panels == search->most_panels;
                    if (!given_up) search->panels[exact.num_panels++] = int32_t(p);
                }
            exact.panels = search->panels;
        }
        if (!given_up) {
            tessera::multiply(exact, hand);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < R; ++r)
                with_numbers(exact, r, [&](auto logits) {
                    peak_of_panels(logits, O, exact.panels, exact.num_panels, search->peaks[r], search->places[r]);
                });
        }
    }
    return given_up ? -1 : exact.num_panels;
}
}
