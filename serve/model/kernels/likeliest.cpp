// The likeliest token of each of few rows, without most of the head: a narrower copy of its weights gives each logit to within a
// bound, and only those that may be the largest are computed by the head itself.
//
// Shapes.  R rows   I input features   O output features, in panels of 32   P panels   S stretches of panels
//
// The narrower product differs from the exact one by (w - n) x + n (x - z), where n is the narrower weight and z the input as the
// narrower product takes it; by Cauchy and Schwarz that is at most |w - n| |x| + |n| |x - z|. What both lose in sums is in proportion
// to |w| |x|, and is put to the first of the two; what is lost when a product or a logit is stored, to that number itself.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parts.h"
#include "products.h"

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

constexpr int64_t kStretch = 128;  // panels
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
};

// What is known of some logits: the largest number that some of them is not below, and the smallest that none is above.
struct Range {
    float floor, top;
};

template <typename V>
inline V larger(V x, V y) {
    return x > y ? x : y;
}

// V logits from ``o`` on, by the products of the copy. Where one or its bound is not finite, ``nothing`` is not zero.
template <typename V>
inline void look(V product, const Bounds& bounds, int64_t o, V& floor, V& top, V& nothing) {
    const V logit = bounds.biases ? product + load_as<V>(bounds.biases + o) : product;
    const V stored = larger(product, -product) + larger(logit, -logit);
    const V lost = load_as<V>(bounds.losses + o) * bounds.size + load_as<V>(bounds.norms + o) * bounds.moved + stored * bounds.rounding;
    const V bound = lost * 1.01f + kLeast;  // it is itself rounded
    nothing += (logit - bound) * 0.0f;
    floor = larger(logit - bound, floor);
    top = larger(logit + bound, top);
}

template <typename scalar>
Range range_of(const scalar* products, const Bounds& bounds, int64_t begin, int64_t end) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    float wide[kPanel];
    const float* all = widen(products + begin, wide, end - begin);
    vec floors = filled<vec>(kLowest), tops = floors, nothings = {};
    int64_t o = begin;
    for (; o + kLanes <= end; o += kLanes) look(load_as<vec>(all + (o - begin)), bounds, o, floors, tops, nothings);
    float floor = kLowest, top = kLowest, nothing = 0.0f;
    for (; o < end; ++o) look(all[o - begin], bounds, o, floor, top, nothing);
    for (int lane = 0; lane < kLanes; ++lane) {
        floor = larger(floors[lane], floor), top = larger(tops[lane], top);
        nothing += nothings[lane];
    }
    return {floor + nothing, top};
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
    const int64_t R = exact.rows, O = exact.width, I = exact.inputs, P = panels_of(O);
    const int64_t S = (P + kStretch - 1) / kStretch;
    std::vector<Row> rows(static_cast<size_t>(R));
    std::vector<float> floors(size_t(R * S)), tops(size_t(R * P));
    std::vector<uint8_t> wanted(size_t(P), 0);
    bool given_up = false;
    const auto bounds_of = [&](int64_t r) {
        return Bounds{search->losses, search->norms, search->biases, rows[size_t(r)].size, rows[size_t(r)].moved, float(search->rounding)};
    };
    const auto end_of = [&](int64_t s) { return (s + 1) * kStretch < P ? (s + 1) * kStretch : P; };
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
            const int64_t r = item / S, end = end_of(item % S);
            const Bounds bounds = bounds_of(r);
            float floor = -std::numeric_limits<float>::infinity();
            with_numbers(narrow, r, [&](auto products) {
                for (int64_t p = item % S * kStretch; p < end; ++p) {
                    const Range range = range_of(products, bounds, p * kPanel, (p + 1) * kPanel < O ? (p + 1) * kPanel : O);
                    floor = range.floor > floor || range.floor != range.floor ? range.floor : floor;
                    tops[size_t(r * P + p)] = range.top;
                    if (range.floor != range.floor) break;
                }
            });
            floors[size_t(item)] = floor;
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < R * S; ++item) {
            const int64_t r = item / S, end = end_of(item % S);
            float floor = floors[size_t(r * S)];
            for (int64_t s = 1; s < S; ++s) {
                const float other = floors[size_t(r * S + s)];
                floor = other > floor || other != other ? other : floor;
            }
            if (floor != floor) {
                __atomic_store_n(&given_up, true, __ATOMIC_RELAXED);
                continue;
            }
            for (int64_t p = item % S * kStretch; p < end; ++p)
                if (tops[size_t(r * P + p)] >= floor) __atomic_store_n(&wanted[size_t(p)], uint8_t(1), __ATOMIC_RELAXED);
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
