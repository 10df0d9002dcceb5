// Sampling: the peak of each row of logits, penalties, and a draw by temperature, min-p, top-k, top-p and typical-p.
//
// Shapes.  V vocabulary   a row is fp32 [V]
//
// A row is gone through a few times in order, never sorted whole: a lower bound below which nothing can be kept leaves few
// candidates where the row is peaked, and a histogram finds the place of the cut where it is flat (candidates.h). Among equal
// logits the smaller id counts as the likelier.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "candidates.h"
#include "vectors.h"

namespace {

constexpr int64_t kChunk = 64;     // logits whose maximum is kept: the k-th largest of the maxima bounds the k-th largest of all
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Rule {
    float temperature;
    float floor;  // log of min-p; minus infinity where there is none
    int64_t top_k;  // V where there is none
    double top_p, typical_p;
    double uniform;
};

// The peak of a row; the maxima of its chunks into ``maxima``.
float find_peak(const float* row, int64_t V, std::vector<float>& maxima) {
    maxima.resize(size_t((V + kChunk - 1) / kChunk));
    float peak = kNone;
    for (int64_t begin = 0, chunk = 0; begin < V; begin += kChunk, ++chunk) {
        float most = kNone;
        if (begin + kChunk <= V) {
            fvec m = load_as<fvec>(row + begin);
            for (int64_t i = kFloats; i < kChunk; i += kFloats) {
                const fvec x = load_as<fvec>(row + begin + i);
                m = x > m ? x : m;
            }
            most = highest_of(m);
        } else {
            for (int64_t i = begin; i < V; ++i) most = row[i] > most ? row[i] : most;
        }
        maxima[size_t(chunk)] = most;
        peak = most > peak ? most : peak;
    }
    return peak;
}

// The sum of exp((x - peak) / T) over what reaches the floor.
double whole_mass(const float* row, int64_t V, float peak, const Rule& rule) {
    double total = 0.0;
    int64_t i = 0;
    for (; i + kLanes <= V;) {
        constexpr int kVectors = kLanes / kFloats;  // sums of sixteen lanes on all processors
        fvec sum[kVectors]{};
        const int64_t end = std::min(V - kLanes + 1, i + 2048);
        for (; i < end; i += kLanes) {
            for (int k = 0; k < kVectors; ++k) {
                const fvec x = (load_as<fvec>(row + i + k * kFloats) - peak) / rule.temperature;
                const fvec e = exp_nonpositive(x);
                sum[k] += x < filled<fvec>(rule.floor) ? fvec{} : e;
            }
        }
        for (int lane = 0; lane < kLanes; ++lane) total += double(sum[lane / kFloats][lane % kFloats]);
    }
    for (; i < V; ++i) {
        const float x = (row[i] - peak) / rule.temperature;
        if (!(x < rule.floor)) total += double(exp_nonpositive(x));
    }
    return total;
}

int64_t draw(const float* row, int64_t V, const Rule& rule, Scratch& s, float& peak) {
    peak = find_peak(row, V, s.maxima);
    if (!std::isfinite(peak)) return 0;
    const bool cuts_k = rule.top_k < V, cuts_p = rule.top_p < 1.0, cuts_typical = rule.typical_p < 1.0;
    float bound = rule.floor;
    double total = 0.0;
    if (cuts_k && rule.top_k <= int64_t(s.maxima.size())) {
        std::nth_element(s.maxima.begin(), s.maxima.begin() + (rule.top_k - 1), s.maxima.end(), std::greater<float>());
        bound = std::max(bound, (s.maxima[size_t(rule.top_k - 1)] - peak) / rule.temperature);
    } else if (!cuts_k && cuts_p) {
        total = whole_mass(row, V, peak, rule);
        // All that is below it together is less than what top-p leaves out. The margin is for rounding.
        const double rest = (1.0 - rule.top_p) * total / double(V);
        if (rest > 0.0) bound = std::max(bound, float(std::log(rest)) - 1e-3f);
    }
    collect(row, V, peak, rule.temperature, bound, s.list);
    if (cuts_k) cut_top_k(s, rule.top_k);
    s.list.weigh();
    Entry last;
    if (cuts_p && find_top_p(s, cuts_k ? s.list.total() : total, rule.top_p, last)) {
        if (cuts_typical)
            keep_up_to(s.list, last);
        else
            weigh_up_to(s.list, last);
    }
    if (cuts_typical) cut_typical(s, rule.typical_p);
    return token_at(s.list, rule.uniform);
}

struct Penalties {
    float again, once, each;  // repetition, presence, frequency
};

// Every id stands once, so those of one vector do not meet. They are fetched and put back one by one, on all processors alike: AVX2
// has no instruction that puts the numbers of a vector back where they belong. ``times`` are looked at where something is subtracted.
template <bool subtracts>
inline void penalise_some(float* row, const int32_t* id, const int32_t* time, int count, const Penalties& by) {
    float value[kFloats]{};
    for (int k = 0; k < count; ++k) value[k] = row[id[k]];
    fvec x = load_as<fvec>(value);
    x = x > fvec{} ? x / by.again : x * by.again;
    if constexpr (subtracts) {
        wvec times{};
        std::memcpy(&times, time, size_t(count) * sizeof(int32_t));
        x -= times > 0 ? by.once + by.each * __builtin_convertvector(times, fvec) : fvec{};
    }
    save_as(x, value);
    for (int k = 0; k < count; ++k) row[id[k]] = value[k];
}

template <bool subtracts>
void penalise(float* row, const int32_t* id, const int32_t* time, int64_t count, const Penalties& by) {
    int64_t i = 0;
    for (; i + kFloats <= count; i += kFloats) penalise_some<subtracts>(row, id + i, time + i, kFloats, by);
    penalise_some<subtracts>(row, id + i, time + i, int(count - i), by);
}

void peak_of(const float* row, int64_t V, float& peak, int64_t& place) {
    constexpr int64_t kStretch = 1024;
    peak = kNone;
    int64_t best = 0;
    bool nan = false;
    for (int64_t begin = 0; begin < V; begin += kStretch) {
        const int64_t end = std::min(V, begin + kStretch);
        float most = kNone;
        int64_t i = begin;
        if (end - begin >= kFloats) {
            fvec m = filled<fvec>(kNone);
            wvec odd{};
            for (; i + kFloats <= end; i += kFloats) {
                const fvec x = load_as<fvec>(row + i);
                m = x > m ? x : m;
                odd |= x != x;
            }
            most = highest_of(m);
            for (int lane = 0; lane < kFloats; ++lane) nan |= odd[lane] != 0;
        }
        for (; i < end; ++i) {
            most = row[i] > most ? row[i] : most;
            nan |= row[i] != row[i];
        }
        if (most > peak) {
            peak = most;
            best = begin;
        }
    }
    place = best;
    while (place < V - 1 && row[place] != peak) ++place;
    if (nan) peak = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

extern "C" {

// The peak of each of R rows and the first place where it stands; NaN where a row holds one.
void tessera_peaks(const float* logits, int64_t R, int64_t V, float* peaks, int64_t* places, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic)
    for (int64_t r = 0; r < R; ++r) peak_of(logits + r * V, V, peaks[r], places[r]);
}

// Choose a token of each of R rows, which are gone through once: the likeliest where ``temperature`` is 0, else a draw. Before that,
// where ``counts[r]`` tokens were seen, divide or multiply by ``repetition`` those of ``ids[r]``, and subtract ``presence`` and
// ``times * frequency`` where they were generated; such rows are changed. ``raw_peaks`` are of the rows as they came, ``peaks``
// of what was chosen from; a token is a draw only where the latter is finite.
void tessera_choose(
    float* logits, int64_t V, int64_t R, const float* repetition, const float* presence, const float* frequency,
    const int64_t* ids, const int64_t* times, const int64_t* counts, const float* temperature, const float* floor,
    const int64_t* top_k, const double* top_p, const double* typical_p, const double* uniform, float* raw_peaks, float* peaks,
    int64_t* tokens, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < R; ++r) {
            float* row = logits + r * V;
            peak_of(row, V, raw_peaks[r], tokens[r]);
            peaks[r] = raw_peaks[r];
            if (counts[r] > 0) {
                // In its place: having been gone through for its peak it is in the core's own cache, and a copy takes longer.
                const Penalties by{repetition[r], presence[r], frequency[r]};
                const bool subtracts = by.once != 0.0f || by.each != 0.0f;
                (subtracts ? penalise<true> : penalise<false>)(
                    row, reinterpret_cast<const int32_t*>(ids[r]), reinterpret_cast<const int32_t*>(times[r]), counts[r], by);
            }
            if (temperature[r] > 0.0f && std::isfinite(raw_peaks[r])) {
                const Rule rule{temperature[r], floor[r], top_k[r], top_p[r], typical_p[r], uniform[r]};
                tokens[r] = draw(row, V, rule, scratch, peaks[r]);
            } else if (counts[r] > 0) {
                peak_of(row, V, peaks[r], tokens[r]);
            }
        }
    }
}

}  // extern "C"
